"""Implicit process rewards (PRIME): log-ratios of a reward model, a copy of the policy trained on the outcomes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from mmrl.errors import UserError
from mmrl.protocols.abilities import DiscreteDecisions
from mmrl.protocols.columns import REWARD
from mmrl.protocols.measurement import PreparedContext, PreparedMeasurement

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.auxiliary import AuxiliaryModule
    from mmrl.rollouts import DecisionColumn, Rollouts


@dataclass(frozen=True)
class ImplicitRewards(PreparedMeasurement["DecisionColumn"]):
    """The process reward beta (log pi_phi - log pi_ref) of each decision, [rollout, decision] fp32; 0 if masked.

    The reward model pi_phi starts as a copy of the policy. Each training step it takes one Adam step on the binary
    cross-entropy of the outcome (0 or 1), whose logit is the sum of the process rewards. pi_ref is the reference
    policy. label: the outcome, accuracy or reward/NAME; updates: pi_phi is trained on rollouts before or after it
    scores them.
    """

    label: str
    beta: float
    lr: float
    updates: Literal["before", "after"]
    requires: ClassVar[type] = DiscreteDecisions
    cost: ClassVar[str] = "a forward and a backward pass of a second model, and with updates=before one more forward"
    scores: ClassVar[bool] = True
    trains_copy: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return f"implicit {self.label} {self.beta:g} {self.lr:g} {self.updates}"

    def measure(self, rollouts: Rollouts, context: PreparedContext) -> DecisionColumn:
        """Trains the reward model on the rollouts and returns their process rewards. Raises UserError if an outcome is
        not 0 or 1."""
        from mmrl.rollouts import DecisionColumn

        policy = context.policy
        module = context.modules.get(self.name, lambda: copy.deepcopy(policy.module), self.lr)
        scores = self._learn(module, rollouts, context)
        if self.updates == "before":
            scores = self._score(module, rollouts, context)
        return DecisionColumn(scores)

    def outcome(self, rollouts: Rollouts, context: PreparedContext) -> Tensor:
        """Returns the outcomes 0 or 1, [rollout]; NaN if unknown, and for rollouts that are masked or only padding.

        Raises UserError if an outcome is not 0 or 1.
        """
        import torch

        from mmrl.rollouts import require

        if self.label.startswith(REWARD):
            index = list(context.task.reward_names).index(self.label.removeprefix(REWARD))
            values = require(rollouts.rewards, "rewards")[:, index]
        else:
            values = require(rollouts.accuracy, "accuracy")
        known = ~values.isnan() & rollouts.mask.any(1)
        if rollouts.filler is not None:
            known = known & ~rollouts.filler
        invalid = values[known & (values != 0) & (values != 1)]
        if len(invalid):
            raise UserError(
                f"algorithm.shaping (implicit_process): label={self.label} is {float(invalid[0]):g} for a rollout, but "
                "must be 0 or 1 for all; set label=reward/NAME to a reward with only these values"
            )
        return values.where(known, torch.nan)

    def _learn(self, module: AuxiliaryModule, rollouts: Rollouts, context: PreparedContext) -> Tensor:
        """Takes an optimizer step of the reward model `module` on the rollouts of all ranks. Returns the process
        rewards before it, [rollout, decision]."""
        import torch

        outcome = self.outcome(rollouts, context)
        count = context.sum(outcome.isfinite().sum())
        scores = torch.zeros(rollouts.mask.shape)

        def losses() -> Iterator[Tensor]:
            """Yields the loss of each micro-batch, and stores its process rewards in `scores`."""
            for rows in context.micro_batches:
                values = self._rewards(module, rollouts.select(rows), context)
                scores[rows] = values.detach().float().cpu()
                labels = outcome[rows].to(values.device)
                yield outcome_loss(values.sum(1), labels) / count.to(values.device).clamp(min=1)

        module.descend(losses(), context.sum)
        return scores

    def _score(self, module: AuxiliaryModule, rollouts: Rollouts, context: PreparedContext) -> Tensor:
        """Returns the process rewards under the reward model `module`, [rollout, decision]."""
        import torch

        scores = torch.zeros(rollouts.mask.shape)
        with torch.no_grad():
            for rows in context.micro_batches:
                scores[rows] = self._rewards(module, rollouts.select(rows), context).float().cpu()
        return scores

    def _rewards(self, module: AuxiliaryModule, micro: Rollouts, context: PreparedContext) -> Tensor:
        """Computes the process rewards of a micro-batch with their gradient, [rollout, decision]."""
        from mmrl.rollouts import require

        logp = context.policy.replay(micro, module.module).logp
        reference = require(micro.ref_logp, "log-probabilities under the reference").to(logp)
        return self.beta * (logp - reference).where(micro.mask.to(logp.device), 0)


def outcome_loss(logits: Tensor, outcome: Tensor) -> Tensor:
    """Computes the sum of the binary cross-entropies, 0-d. logits: [rollout]; outcome: [rollout], 0, 1, or NaN, which
    is left out."""
    import torch

    known = outcome.isfinite()
    return torch.nn.functional.binary_cross_entropy_with_logits(
        logits, outcome.where(known, 0).to(logits), weight=known.to(logits), reduction="sum"
    )

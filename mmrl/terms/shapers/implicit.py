"""Credit of tokens by a second model that learns from outcomes alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from mmrl.measurements.implicit import ImplicitRewards
from mmrl.protocols.requirements import Needs, Reference, needs_column
from mmrl.settings import option
from mmrl.terms.term import Shaper

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch


class ImplicitProcess(Shaper):
    """A copy of the policy learns to tell right rollouts from wrong ones by the sum of its log-ratios to the reference,
    beside the policy and from its rollouts. Each of these log-ratios is then the process reward of a token. With
    algorithm.baseline=leave_one_out and algorithm.scale=none this is PRIME's advantage."""

    equation: ClassVar[str] = (
        "r_t = beta (log pi_phi(y_t) - log pi_ref(y_t)); phi minimises -o log s - (1 - o) log(1 - s), s = "
        "sigmoid(sum_t r_t), o the outcome; A_t = outcome A + weight sum_{u >= t} gamma^(u - t) (r_u - b), b the mean "
        "over the other rollouts of the group of their mean r"
    )
    source: ClassVar[str] = "PRIME, arXiv 2502.01456; Implicit PRM, arXiv 2412.01981"
    test: ClassVar[str] = "tests/whole_runs/test_implicit_process.py"
    type: str = "implicit_process"
    label: str = option("accuracy", "the outcome, 0 or 1, that it learns from: accuracy or reward/NAME")
    beta: float = option(0.05, "of the log-ratio", gt=0)
    lr: float = option(1e-6, "of the copy's optimizer (Adam)", ge=0)
    gamma: float = option(1.0, "discount of a decision", ge=0, le=1)
    weight: float = option(1.0, "of the process advantages", ge=0)
    outcome: float = option(1.0, "weight of the advantages that the algorithm gave the whole rollout", ge=0)
    updates: Literal["before", "after"] = option(
        "before", "it learns from the rollouts of a step before it scores them, in a second forward pass, or after"
    )

    @property
    def measurement(self) -> ImplicitRewards:
        return ImplicitRewards(self.label, self.beta, self.lr, self.updates)

    @property
    def needs(self) -> Needs:
        return needs_column(self.label) | Needs(reference=Reference(), measurements=(self.measurement,))

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        from mmrl.core.credit import leave_one_out_returns

        rewards = batch.measured(self.measurement).values
        scored = batch.rollout_mask & batch.local(batch.combined_rewards()).isfinite()
        counted = batch.rollouts.mask & scored[:, None]
        self._report(rewards, batch)
        process = leave_one_out_returns(rewards, counted, batch.rollouts.group, self.gamma)
        return self.outcome * advantages + self.weight * process.to(advantages)

    def _report(self, rewards: Tensor, batch: Batch) -> None:
        """Reports the cross-entropy, and the share of rollouts on whose side of 1/2 the copy is, after its update or
        before it, as `updates` says."""
        from mmrl.measurements.implicit import outcome_loss

        logits, outcome = batch.gather(rewards.sum(1)), batch.column(self.label)
        known = outcome.isfinite() & (batch.column("length") > 0)
        if bool(known.any()):
            logits, outcome = logits[known], outcome[known]
            batch.report(
                {
                    "implicit_process/loss": float(outcome_loss(logits, outcome) / len(logits)),
                    "implicit_process/accuracy": float(((logits > 0) == (outcome > 0.5)).float().mean()),
                }
            )

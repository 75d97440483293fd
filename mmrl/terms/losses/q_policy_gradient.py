"""Policy gradient on proposed chunks of actions, with Q networks as their reward."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from mmrl.protocols.abilities import OffPolicyLearning
from mmrl.protocols.requirements import Needs
from mmrl.schedules.schedule import Schedule, number
from mmrl.settings import option
from mmrl.terms.losses.advantage_weighted import StepReturns
from mmrl.terms.losses.q_weighted import PolicyQFunctions, estimates_of, report_agreement
from mmrl.terms.term import Term

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.measurements.q_values import QValues
    from mmrl.protocols.batch import Batch
    from mmrl.protocols.parts import RolloutKind
    from mmrl.rollouts import Replay, Rollouts


class QPolicyGradient(Term):
    """PPO on chunks of rollout.extras=[action_proposals]: the reward of a chunk is its Q value, and its advantage
    compares it with the other chunks at the same observation. None of the chunks is executed."""

    equation: ClassVar[str] = (
        "-coefficient min(r A, clamp(r, 1 - clip, 1 + clip) A), A = (Q(s, a) - mean_group Q) / std_group Q"
    )
    source: ClassVar[str] = (
        "OGPO, arXiv 2605.03065 (a critic as the reward of sampled chunks); target=value: with IQL's critic"
    )
    test: ClassVar[str] = "tests/joints/test_q_policy_gradient.py"
    type: str = "q_policy_gradient"
    coefficient: Schedule = number(1.0, "weight of the term", ge=0)
    clip: float = option(0.2, "bound of the ratio on both sides of 1", gt=0, lt=1)
    scale: Literal["group_std", "none"] = option("group_std", "divisor of the advantages")
    returns: StepReturns = option(StepReturns(), "rewards that Q sums")
    q: PolicyQFunctions = option(PolicyQFunctions(), "the Q networks and V")

    @property
    def measurement(self) -> QValues:
        return self.q.measurement(self.returns)

    @property
    def learns_from(self) -> frozenset[RolloutKind]:
        return frozenset({"proposals"})

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({OffPolicyLearning}), old=True, measurements=(self.measurement,))

    def prepare(self, batch: Batch) -> None:
        """Stores the advantage of each proposed chunk, [rollout]; NaN for other rollouts."""
        import torch

        from mmrl.core.advantages import group_advantages
        from mmrl.rollouts import PROPOSED, Column, require

        report_agreement(batch, self.measurement, self.returns)
        rollouts = batch.rollouts
        q = estimates_of(rollouts, self.measurement)["q"]
        proposed = (require(rollouts.origin, "origins") == PROPOSED) & ~q.isnan()
        advantages = torch.full_like(q, torch.nan)
        if proposed.any():
            advantages[proposed] = group_advantages(q[proposed], rollouts.group[proposed], scale=self.scale)[0]
        rollouts.extras[self.key] = Column(advantages)

    def values(self, micro: Rollouts, replay: Replay) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes PPO's clipped objective of the proposed chunks, 0 for other rollouts, and statistics; [rollout,
        decision]."""
        import torch

        from mmrl.core.surrogates import surrogate
        from mmrl.rollouts import Column, log_ratio

        advantages = micro.extra(self.key, Column).values.to(replay.logp)[:, None].expand(replay.logp.shape)
        proposed = ~advantages.isnan()
        values, stats = surrogate(
            log_ratio(micro, replay).where(proposed, 0),
            advantages.nan_to_num(),
            clip_low=self.clip,
            clip_high=self.clip,
        )
        q = estimates_of(micro, self.measurement)["q"].to(replay.logp)[:, None].expand(replay.logp.shape)
        named = {
            "q": q,
            "advantage": advantages,
            "ratio": stats["ratio"],
            "clipped": stats["clip_low"] + stats["clip_high"],
        }
        columns = {f"q_policy_gradient/{name}": column.where(proposed, torch.nan) for name, column in named.items()}
        return self.coefficient.value * values.where(proposed, 0), columns

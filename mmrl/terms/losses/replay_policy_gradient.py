"""Policy gradient on rollouts of earlier steps, with the advantages that they had then."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.protocols.requirements import Needs
from mmrl.schedules.schedule import Schedule, number
from mmrl.settings import option
from mmrl.terms.term import Term

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.parts import RolloutKind
    from mmrl.rollouts import Replay, Rollouts

REPLAYED_ADVANTAGES = "replayed_advantages"  # a `Column` of rollouts that rollout.extras=[advantage_replay] makes


class ReplayPolicyGradient(Term):
    """PPO's objective of rollouts of earlier steps, which rollout.extras=[advantage_replay] replays, with the
    advantages that they had in their own step. Their ratio is to the policy that sampled them. They are in the updates
    of a step, where EFRame makes an update of its own."""

    equation: ClassVar[str] = (
        "-coefficient min(r A, clamp(r, 1 - low, 1 + high) A), A as stored, r = exp(logp - the stored logp)"
    )
    source: ClassVar[str] = "EFRame, arXiv 2506.22200"
    test: ClassVar[str] = "tests/joints/test_large_advantages.py"
    type: str = "replay_policy_gradient"
    coefficient: Schedule = number(1.0, "weight of the term", ge=0)
    low: float = option(0.2, "lower clip bound: the ratio gains nothing below 1 - low", ge=0, le=1)
    high: float = option(0.28, "upper clip bound: the ratio gains nothing above 1 + high", ge=0)

    @property
    def learns_from(self) -> frozenset[RolloutKind]:
        return frozenset({"large_advantages"})

    @property
    def needs(self) -> Needs:
        return Needs(old=True)

    def values(self, micro: Rollouts, replay: Replay) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes PPO's clipped objective of the replayed rollouts, 0 for other rollouts, and statistics; [rollout,
        decision]."""
        import torch

        from mmrl.core.surrogates import surrogate
        from mmrl.rollouts import Column, log_ratio

        advantages = micro.extra(REPLAYED_ADVANTAGES, Column).values.to(replay.logp)[:, None].expand(replay.logp.shape)
        replayed = ~advantages.isnan()
        values, stats = surrogate(
            log_ratio(micro, replay).where(replayed, 0),
            advantages.nan_to_num(),
            clip_low=self.low,
            clip_high=self.high,
        )
        named = {"advantage": advantages, "ratio": stats["ratio"], "clipped": stats["clip_low"] + stats["clip_high"]}
        columns = {
            f"replay_policy_gradient/{name}": column.where(replayed, torch.nan) for name, column in named.items()
        }
        return self.coefficient.value * values.where(replayed, 0), columns

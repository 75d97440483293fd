"""A surrogate whose ratios are normalized over the group, for ratios that are only estimates (StableDRL)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.algorithms.surrogates.surrogate import AS_REINFORCE, Clipped, Result
from mmrl.protocols.requirements import Needs
from mmrl.schedules.schedule import Schedule, number

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.rollouts import Replay, Rollouts


class SelfNormalised(Clipped):
    """The policy gradient with importance weights that are clipped on both sides and divided by their group mean.

    They are clipped regardless of the sign of the advantage, so that a ratio estimate with a large error cannot
    dominate the update. With algorithm.level=sequence, all decisions of a rollout have one weight.
    """

    equation: ClassVar[str] = "gradient -(w / mean w of the group) A dlogp, w = clamp(r, 1 - low, 1 + high)"
    source: ClassVar[str] = "reconstructed from StableDRL's abstract: unconditional clipping and self-normalisation"
    test: ClassVar[str] = "tests/joints/test_self_normalised.py"
    at_one_update: ClassVar[str] = f"{AS_REINFORCE}: all weights are 1"
    type: str = "self_normalised"
    low: Schedule = number(0.2, "smallest weight is 1 - low, before normalization", ge=0, lt=1)
    high: Schedule = number(0.2, "largest weight is 1 + high, before normalization", ge=0)

    @property
    def needs(self) -> Needs:
        return Needs(whole_groups=True)

    def values(self, log_ratio: Tensor, advantages: Tensor, micro: Rollouts, replay: Replay) -> Result:
        """Computes -w A logp, where w is the clamped ratio, without gradient, divided by its mean over the decisions of
        the group; [rollout, decision]."""
        ratio = log_ratio.detach().exp()
        weight = ratio.clamp(1 - self.low.value, 1 + self.high.value)
        mask = micro.mask.to(weight.device)
        normalized = weight.clone()
        for group in micro.group.unique():
            rows = (micro.group == group).to(weight.device)
            group_weights = weight[rows][mask[rows]]
            if len(group_weights):
                normalized[rows] = weight[rows] / group_weights.mean()
        stats = {"ratio": ratio, "clipped": (ratio != weight).float(), "share": normalized}
        return -normalized * advantages * replay.logp, stats

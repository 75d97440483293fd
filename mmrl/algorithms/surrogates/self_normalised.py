"""A surrogate whose ratios are normalised over a group, for ratios that are only estimates."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.algorithms.surrogates.surrogate import AS_REINFORCE, Clipped, Result
from mmrl.protocols.requirements import Needs
from mmrl.schedules.schedule import Schedule, number

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.rollouts import Replay, Rollouts


class SelfNormalised(Clipped):
    """The policy gradient with importance weights that are clipped on both sides, whatever the sign of the advantage,
    and then divided by their mean over the group: an estimate of a ratio that is far off can not make the update larger
    than those of its rollouts. With algorithm.level=sequence a rollout has one weight."""

    equation: ClassVar[str] = "gradient -(w / mean w of the group) A dlogp, w = clamp(r, 1 - low, 1 + high)"
    source: ClassVar[str] = "reconstructed from StableDRL's abstract: unconditional clipping and self-normalisation"
    test: ClassVar[str] = "tests/joints/test_self_normalised.py"
    at_one_update: ClassVar[str] = f"{AS_REINFORCE}: all weights are 1"
    type: str = "self_normalised"
    low: Schedule = number(0.2, "smallest weight is 1 - low before they are normalised", ge=0, lt=1)
    high: Schedule = number(0.2, "largest weight is 1 + high before they are normalised", ge=0)

    @property
    def needs(self) -> Needs:
        return Needs(whole_groups=True)

    def values(self, log_ratio: Tensor, advantages: Tensor, micro: Rollouts, replay: Replay) -> Result:
        ratio = log_ratio.detach().exp()
        weight = ratio.clamp(1 - self.low.value, 1 + self.high.value)
        mask = micro.mask.to(weight.device)
        share = weight.clone()
        for group in micro.group.unique():
            rows = (micro.group == group).to(weight.device)
            counted = weight[rows][mask[rows]]
            if len(counted):
                share[rows] = weight[rows] / counted.mean()
        return -share * advantages * replay.logp, {"ratio": ratio, "clipped": (ratio != weight).float(), "share": share}

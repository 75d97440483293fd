"""Advantages of one reward, composed of transforms, a baseline and a scale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mmrl.algorithms.baselines.baseline import Baseline, LeaveOneOut, Mean
from mmrl.algorithms.scales.scale import BatchStd, NoScale, Scale

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.algorithms.baselines.baseline import Total
    from mmrl.algorithms.reward_transforms.transform import Transform
    from mmrl.protocols.batch import Batch

# Cases that one fused kernel computes, by their names in the kernel. The keys are methods, so that a class which
# inherits from one of these and computes something else is composed.
FUSED_BASELINES = {Mean.centre: "mean", LeaveOneOut.centre: "leave_one_out", Baseline.centre: "none"}
FUSED_SCALES = {
    (Scale.buckets, Scale.divide): "group_std",
    (BatchStd.buckets, Scale.divide): "batch_std",
    (Scale.buckets, NoScale.divide): "none",
}


class Estimator:
    """An estimator of advantages from one reward, [rollout of all ranks] -> [rollout of all ranks]; 0 where it is NaN.

    total: [rollout, component] -> [rollout], as the algorithm combines rewards. groups: the group of each rollout, from
    0, and their number.
    """

    def __init__(
        self, transforms: Sequence[Transform], baseline: Baseline, scale: Scale, batch: Batch, total: Total
    ) -> None:
        from mmrl.core.advantages import group_index

        self.transforms, self.baseline, self.scale, self.batch, self.total = transforms, baseline, scale, batch, total
        self.groups = group_index(batch.column("group"))
        methods = (type(scale).buckets, type(scale).divide)
        self._names = FUSED_BASELINES.get(type(baseline).centre), FUSED_SCALES.get(methods)
        # Once for all rewards; the fused pass needs none.
        self._buckets = self.groups[0] if all(self._names) else group_index(scale.buckets(batch))[0]

    def __call__(self, reward: Tensor) -> Tensor:
        return self.compare(self.transform(reward))

    def transform(self, reward: Tensor) -> Tensor:
        """Applies all transforms and subtracts the baseline's `of`. NaN stays NaN."""
        for transform in self.transforms:
            reward = transform.change(reward, self.batch)
        return reward - self.baseline.of(reward, self.batch, self.total)

    def compare(self, reward: Tensor) -> Tensor:
        """Subtracts the statistic of the group from a transformed reward and divides by the scale."""
        from mmrl import kernels
        from mmrl.core.advantages import moments

        (index, groups), (baseline, scale) = self.groups, self._names
        if baseline is not None and scale is not None:
            return kernels.group_advantage(reward, index, groups, baseline=baseline, scale=scale).advantages
        difference = self.baseline.centre(reward, index, moments(reward, index, groups), self.batch)
        return self.scale.divide(difference, reward, self._buckets).where(~reward.isnan(), 0)

    def silent(self, reward: Tensor) -> Tensor:
        """Returns where a transformed reward can not differ from its baseline, for the whole group has the same,
        [rollout] bool."""
        from mmrl.core.advantages import moments

        index, groups = self.groups
        return moments(reward, index, groups).equal[index] & self.baseline.within_group

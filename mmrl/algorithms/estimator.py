"""The estimator of advantages from one reward, which is composed of reward transforms, a baseline and a scale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mmrl.algorithms.baselines.baseline import Baseline, LeaveOneOut, Mean
from mmrl.algorithms.scales.scale import BatchStd, NoScale, Scale

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.algorithms.baselines.baseline import CombineRewards
    from mmrl.algorithms.reward_transforms.transform import Transform
    from mmrl.protocols.batch import Batch

# Baselines and scales that the fused kernel group_advantage computes, with its names for them. The keys are
# methods, not classes, so that a subclass which overrides them does not count as fused.
FUSED_BASELINES = {Mean.center: "mean", LeaveOneOut.center: "leave_one_out", Baseline.center: "none"}
FUSED_SCALES = {
    (Scale.buckets, Scale.divide): "group_std",
    (BatchStd.buckets, Scale.divide): "batch_std",
    (Scale.buckets, NoScale.divide): "none",
}


class Estimator:
    """Computes advantages [rollout of all ranks] from one reward [rollout of all ranks]; 0 where the reward is NaN.

    combine: combines reward components [rollout, component] to one reward [rollout]. The attribute `groups` is a
    pair: the group of each rollout, from 0, and the number of groups.
    """

    def __init__(
        self, transforms: Sequence[Transform], baseline: Baseline, scale: Scale, batch: Batch, combine: CombineRewards
    ) -> None:
        from mmrl.core.advantages import group_index

        self.transforms, self.baseline, self.scale, self.batch = transforms, baseline, scale, batch
        self.combine = combine
        self.groups = group_index(batch.column("group"))
        methods = (type(scale).buckets, type(scale).divide)
        # the fused kernel's names of the baseline and the scale; None for one that the kernel does not compute
        self._fused_names = FUSED_BASELINES.get(type(baseline).center), FUSED_SCALES.get(methods)
        # computed once for all rewards; the fused kernel computes its stds from the groups, without buckets
        self._buckets = self.groups[0] if all(self._fused_names) else group_index(scale.buckets(batch))[0]

    def __call__(self, reward: Tensor) -> Tensor:
        return self.normalize(self.transform(reward))

    def transform(self, reward: Tensor) -> Tensor:
        """Applies all transforms and subtracts the baseline of each rollout (`Baseline.compute`). NaN stays NaN."""
        for transform in self.transforms:
            reward = transform.change(reward, self.batch)
        return reward - self.baseline.compute(reward, self.batch, self.combine)

    def normalize(self, reward: Tensor) -> Tensor:
        """Returns (reward - the group's baseline) / scale of a transformed reward, [rollout of all ranks]; 0 where it
        is NaN. The fused kernel computes it if it knows baseline and scale."""
        from mmrl import kernels
        from mmrl.core.advantages import moments

        (index, groups), (baseline, scale) = self.groups, self._fused_names
        if baseline is not None and scale is not None:
            return kernels.group_advantage(reward, index, groups, baseline=baseline, scale=scale).advantages
        difference = self.baseline.center(reward, index, moments(reward, index, groups), self.batch)
        return self.scale.divide(difference, reward, self._buckets).where(~reward.isnan(), 0)

    def has_no_signal(self, reward: Tensor) -> Tensor:
        """Returns where the advantage of a transformed reward must be 0, since all rewards of the group are equal,
        [rollout] bool."""
        from mmrl.core.advantages import moments

        index, groups = self.groups
        return moments(reward, index, groups).equal[index] & self.baseline.zero_if_equal

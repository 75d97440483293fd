"""The mean of the batch as the baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.algorithms.baselines.baseline import Baseline, CombineRewards

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch


class BatchMean(Baseline):
    """The mean reward of all rollouts of the step. With algorithm.scale=batch_std, rewards are whitened over the batch.

    REINFORCE++ whitens over decisions instead: baseline none, scale none and the shaper whitening. REINFORCE++-baseline
    is baseline mean, scale none and that shaper.
    """

    equation: ClassVar[str] = "A = r - mean of the batch"
    source: ClassVar[str] = "REINFORCE++, arXiv 2501.03262"
    test: ClassVar[str] = "tests/joints/test_baselines.py"
    uses_other_rollouts: ClassVar[bool] = False
    default_scale: ClassVar[str] = "batch_std"
    type: str = "batch_mean"

    def compute(self, rewards: Tensor, batch: Batch, combine: CombineRewards) -> Tensor:
        return rewards.nanmean().expand_as(rewards)

"""The mean of the batch as the baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.algorithms.baselines.baseline import Baseline, Total

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch


class BatchMean(Baseline):
    """The mean reward of all rollouts of the step, whatever their prompts. With algorithm.scale=batch_std rewards are
    whitened over the batch, in which rollouts count alike. REINFORCE++ whitens over decisions: baseline none, scale
    none and the shaper whitening; REINFORCE++-baseline is baseline mean, scale none and that shaper."""

    equation: ClassVar[str] = "A = r - mean of the batch"
    source: ClassVar[str] = "REINFORCE++, arXiv 2501.03262"
    test: ClassVar[str] = "tests/joints/test_baselines.py"
    compares: ClassVar[bool] = False
    usual_scale: ClassVar[str] = "batch_std"
    type: str = "batch_mean"

    def of(self, rewards: Tensor, batch: Batch, total: Total) -> Tensor:
        return rewards.nanmean().expand_as(rewards)

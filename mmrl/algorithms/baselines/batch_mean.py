"""The mean of the batch as the baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.algorithms.baselines.baseline import Baseline, Total

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch


class BatchMean(Baseline):
    """The mean reward of all rollouts of the step, whatever their prompts. With algorithm.scale=batch_std rewards are
    whitened over the batch; with baseline mean and that scale it is REINFORCE++-baseline."""

    equation: ClassVar[str] = "A = r - mean of the batch"
    source: ClassVar[str] = "REINFORCE++, arXiv 2501.03262"
    test: ClassVar[str] = "tests/joints/test_baselines.py"
    compares: ClassVar[bool] = False
    type: str = "batch_mean"

    def of(self, rewards: Tensor, batch: Batch, total: Total) -> Tensor:
        return rewards.nanmean().expand_as(rewards)

"""A quantile of the group's rewards as the baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.algorithms.baselines.baseline import Baseline, CombineRewards
from mmrl.settings import option

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch


class Quantile(Baseline):
    """A quantile of the group's rewards.

    The median is robust to one extreme reward. With a high quantile only the best rollouts have positive advantages,
    with a low one only the worst have negative ones.
    """

    equation: ClassVar[str] = "A = r - quantile_q(r_1 .. r_G), with linear interpolation"
    source: ClassVar[str] = "QAE, arXiv 2509.22611"
    test: ClassVar[str] = "tests/joints/test_baselines.py"
    zero_if_equal: ClassVar[bool] = True
    type: str = "quantile"
    q: float = option(0.5, "fraction of the group below it; 0.5 is the median", ge=0, le=1)

    def compute(self, rewards: Tensor, batch: Batch, combine: CombineRewards) -> Tensor:
        """Returns the `q` quantile of the known rewards in each rollout's group, [rollout of all ranks]."""
        import torch

        group, quantiles = batch.column("group"), torch.full_like(rewards, torch.nan)
        for g in group.unique():
            rows = group == g
            quantiles[rows] = rewards[rows].nanquantile(self.q)
        return quantiles

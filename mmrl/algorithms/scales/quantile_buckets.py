"""A standard deviation over prompts of similar difficulty."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.algorithms.scales.scale import Scale
from mmrl.protocols.requirements import Needs, needs_column
from mmrl.settings import option

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch


class QuantileBucketStd(Scale):
    """The std of all rollouts whose groups are in the same quantile of some quantity, such as accuracy or length.

    Unlike the group's own std, it is not tiny for a group that is nearly all right.
    """

    equation: ClassVar[str] = (
        "A = (r - b) / (std of the bucket + 1e-6); groups are split into `count` buckets of about equal size by their "
        "mean of the quantity; groups for which it is unknown are one more bucket"
    )
    source: ClassVar[str] = "difficulty-aware group normalisation, Durian, arXiv 2602.21743"
    test: ClassVar[str] = "tests/joints/test_baselines.py"
    type: str = "quantile_bucket_std"
    by: str = option("accuracy", "quantity (`mmrl.protocols.columns`); logp is the policy's confidence")
    count: int = option(4, "number of buckets", ge=1)

    @property
    def needs(self) -> Needs:
        return needs_column(f"group/{self.by}")

    def buckets(self, batch: Batch) -> Tensor:
        """Computes each rollout's bucket, [rollout] in 0..count, where `count` is for unknown values."""
        import torch

        group, values = batch.column("group"), batch.column(f"group/{self.by}")  # values: the group's mean, [rollout]
        known = ~values.isnan()
        by_group = torch.zeros(1)  # any value, since no group needs it if none is known
        if known.any():
            by_group = torch.stack([values[group == g][0] for g in group[known].unique()])
        cuts = by_group.quantile(torch.arange(1, self.count).to(by_group) / self.count)
        return (values[:, None] > cuts).sum(1).where(known, self.count)

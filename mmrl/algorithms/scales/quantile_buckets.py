"""A standard deviation that prompts of like difficulty share."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.algorithms.scales.scale import Scale
from mmrl.protocols.requirements import Needs, needs_column
from mmrl.settings import option

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch


class QuantileBucketStd(Scale):
    """The standard deviation of all rollouts whose groups are in the same quantile of a fact, such as accuracy, length
    or the policy's own confidence. A group that is nearly all right has a tiny deviation of its own."""

    equation: ClassVar[str] = (
        "A = (r - b) / (std of the bucket + 1e-6); groups are cut into `count` buckets of about equal numbers by their "
        "mean of the fact; those for which it is unknown are one more"
    )
    source: ClassVar[str] = "difficulty-aware group normalisation, Durian, arXiv 2602.21743"
    test: ClassVar[str] = "tests/joints/test_baselines.py"
    type: str = "quantile_bucket_std"
    by: str = option("accuracy", "the fact of `mmrl.protocols.batch`; logp is the policy's confidence")
    count: int = option(4, "buckets", ge=1)

    @property
    def needs(self) -> Needs:
        return needs_column(f"group/{self.by}")

    def buckets(self, batch: Batch) -> Tensor:
        """Computes each rollout's bucket, [rollout] in 0..count; `count` is that of groups whose fact is unknown."""
        import torch

        group, fact = batch.column("group"), batch.column(f"group/{self.by}")
        known = ~fact.isnan()
        one = torch.stack([fact[group == g][0] for g in group[known].unique()]) if known.any() else torch.zeros(1)
        cuts = one.quantile(torch.arange(1, self.count).to(one) / self.count)
        return (fact[:, None] > cuts).sum(1).where(known, self.count)

"""Scales: what the difference of a reward from its baseline is divided by."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.protocols.requirements import Needs
from mmrl.settings import Choice, option

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch


class Scale(Choice):
    """What the difference from the baseline is divided by. known: the name that `core.advantages` has for it."""

    title: ClassVar[str] = "scale of advantages"
    kinds: ClassVar[dict[str, str]] = {
        "group_std": "mmrl.algorithms.scales.scale:GroupStd",
        "batch_std": "mmrl.algorithms.scales.scale:BatchStd",
        "bucket_std": "mmrl.algorithms.scales.scale:BucketStd",
        "quantile_bucket_std": "mmrl.algorithms.scales.quantile_buckets:QuantileBucketStd",
        "none": "mmrl.algorithms.scales.scale:NoScale",
    }
    test: ClassVar[str] = "tests/joints/test_advantages.py"
    known: ClassVar[str]

    @property
    def needs(self) -> Needs:
        return Needs()

    def buckets(self, batch: Batch) -> Tensor | None:
        """[rollout of all ranks] whose standard deviation is shared, for scales of buckets."""
        return None


class GroupStd(Scale):
    """The standard deviation of the group."""

    equation: ClassVar[str] = "A = (r - b) / (std of the group + 1e-6)"
    source: ClassVar[str] = "GRPO, arXiv 2402.03300"
    known: ClassVar[str] = "group_std"
    type: str = "group_std"


class BatchStd(Scale):
    """The standard deviation of the batch."""

    equation: ClassVar[str] = "A = (r - b) / (std of the batch + 1e-6)"
    source: ClassVar[str] = "REINFORCE++, arXiv 2501.03262"
    known: ClassVar[str] = "batch_std"
    type: str = "batch_std"


class BucketStd(Scale):
    """The standard deviation of all rollouts that have a fact in common, such as the difficulty of their prompt."""

    equation: ClassVar[str] = "A = (r - b) / (std of the bucket + 1e-6)"
    source: ClassVar[str] = "Durian, arXiv 2602.21743"
    known: ClassVar[str] = "bucket_std"
    type: str = "bucket_std"
    by: str = option(description="the fact: a key of the prompts' metadata, or another of `mmrl.protocols.batch`")

    def buckets(self, batch: Batch) -> Tensor | None:
        return batch.fact(self.by)


class NoScale(Scale):
    """Nothing."""

    equation: ClassVar[str] = "A = r - b"
    source: ClassVar[str] = "Dr.GRPO, arXiv 2503.20783"
    known: ClassVar[str] = "none"
    type: str = "none"

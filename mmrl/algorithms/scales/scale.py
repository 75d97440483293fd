"""Base class of scales, which divide the difference of a reward from its baseline, and the common ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.protocols.requirements import Needs, needs_column
from mmrl.settings import Choice, option

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch


class Scale(Choice):
    """A scale that divides differences from the baseline: the standard deviation of a bucket of rollouts (`buckets`),
    or something else (`divide`). Users' classes override one of the two."""

    title: ClassVar[str] = "scale of advantages"
    changes: ClassVar[frozenset[str]] = frozenset({"advantages"})  # in a step, by itself
    kinds: ClassVar[dict[str, str]] = {
        "group_std": "mmrl.algorithms.scales.scale:GroupStd",
        "batch_std": "mmrl.algorithms.scales.scale:BatchStd",
        "bucket_std": "mmrl.algorithms.scales.scale:BucketStd",
        "quantile_bucket_std": "mmrl.algorithms.scales.quantile_buckets:QuantileBucketStd",
        "none": "mmrl.algorithms.scales.scale:NoScale",
    }
    test: ClassVar[str] = "tests/joints/test_advantages.py"
    of_group: ClassVar[bool] = False  # whether it is a deviation within the group, which a group of one does not have

    @property
    def needs(self) -> Needs:
        return Needs()

    def buckets(self, batch: Batch) -> Tensor:
        """Returns numbers that are equal for rollouts that share a scale, [rollout of all ranks]; by default the
        group's."""
        return batch.column("group")

    def divide(self, differences: Tensor, rewards: Tensor, buckets: Tensor) -> Tensor:
        """Divides differences from the baseline by the scale of the rewards of their bucket, [rollout of all ranks]; 0
        in a bucket whose rewards are all equal. buckets: their numbers from 0, [rollout]."""
        from mmrl.core.advantages import over_std

        return over_std(differences, rewards, buckets, int(buckets.max()) + 1)


class GroupStd(Scale):
    """The standard deviation of the group."""

    equation: ClassVar[str] = "A = (r - b) / (std of the group + 1e-6)"
    source: ClassVar[str] = "GRPO, arXiv 2402.03300"
    of_group: ClassVar[bool] = True
    compared: ClassVar[str] = "volcengine/verl@b178a3cd"
    type: str = "group_std"


class BatchStd(Scale):
    """The standard deviation of the batch's rewards, before a baseline of the group is subtracted. The shaper whitening
    divides by that of the advantages, which is smaller the more prompts differ."""

    equation: ClassVar[str] = "A = (r - b) / (std of r over the batch + 1e-6)"
    source: ClassVar[str] = "LitePPO, arXiv 2508.08221; scale_rewards=batch of TRL"
    type: str = "batch_std"

    def buckets(self, batch: Batch) -> Tensor:
        import torch

        return torch.zeros_like(batch.column("group"))


class BucketStd(Scale):
    """The standard deviation of all rollouts that have a fact in common, such as the difficulty of their prompt."""

    equation: ClassVar[str] = "A = (r - b) / (std of the bucket + 1e-6)"
    source: ClassVar[str] = "Durian, arXiv 2602.21743"
    type: str = "bucket_std"
    by: str = option(description="the fact: a key of the prompts' metadata, or another of `mmrl.protocols.batch`")

    @property
    def needs(self) -> Needs:
        return needs_column(self.by)

    def buckets(self, batch: Batch) -> Tensor:
        return batch.column(self.by)


class NoScale(Scale):
    """No scale: differences stay as they are."""

    equation: ClassVar[str] = "A = r - b"
    source: ClassVar[str] = "Dr.GRPO, arXiv 2503.20783"
    compared: ClassVar[str] = "volcengine/verl@b178a3cd"
    type: str = "none"

    def divide(self, differences: Tensor, rewards: Tensor, buckets: Tensor) -> Tensor:
        return differences

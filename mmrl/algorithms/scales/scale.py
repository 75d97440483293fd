"""Base class of scales, which divide the difference of reward and baseline, and the common scales."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.protocols.requirements import Needs, needs_column
from mmrl.settings import Choice, option

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch


class Scale(Choice):
    """A divisor of advantages: by default the std of the rewards in the rollout's bucket.

    A class of your own overrides `buckets`, the rollouts that share a std, or `divide`, the division itself.
    """

    title: ClassVar[str] = "scale of advantages"
    changes: ClassVar[frozenset[str]] = frozenset({"advantages"})  # what the scale changes in a step
    kinds: ClassVar[dict[str, str]] = {
        "group_std": "mmrl.algorithms.scales.scale:GroupStd",
        "batch_std": "mmrl.algorithms.scales.scale:BatchStd",
        "bucket_std": "mmrl.algorithms.scales.scale:BucketStd",
        "quantile_bucket_std": "mmrl.algorithms.scales.quantile_buckets:QuantileBucketStd",
        "none": "mmrl.algorithms.scales.scale:NoScale",
    }
    test: ClassVar[str] = "tests/joints/test_advantages.py"
    needs_group: ClassVar[bool] = False  # whether it is a std within the group, which is 0 for a group of one

    @property
    def needs(self) -> Needs:
        """Returns what the scale requires of the policy and the job."""
        return Needs()

    def buckets(self, batch: Batch) -> Tensor:
        """Returns the bucket id of each rollout, [rollout of all ranks]; by default its group."""
        return batch.column("group")

    def divide(self, differences: Tensor, rewards: Tensor, buckets: Tensor) -> Tensor:
        """Divides reward minus baseline by the std of the rewards in the bucket, [rollout of all ranks].

        differences: rewards minus the baseline; buckets: [rollout], renumbered from 0. A bucket of equal rewards gets
        0.
        """
        from mmrl.core.advantages import divide_by_std

        return divide_by_std(differences, rewards, buckets, int(buckets.max()) + 1)


class GroupStd(Scale):
    """The standard deviation of the group."""

    equation: ClassVar[str] = "A = (r - b) / (std of the group + 1e-6)"
    source: ClassVar[str] = "GRPO, arXiv 2402.03300"
    needs_group: ClassVar[bool] = True
    type: str = "group_std"


class BatchStd(Scale):
    """The standard deviation of the batch's rewards, before a group baseline is subtracted.

    The shaper whitening divides by the std of the advantages instead, which is smaller if prompts differ in difficulty.
    """

    equation: ClassVar[str] = "A = (r - b) / (std of r over the batch + 1e-6)"
    source: ClassVar[str] = "LitePPO, arXiv 2508.08221; scale_rewards=batch of TRL"
    type: str = "batch_std"

    def buckets(self, batch: Batch) -> Tensor:
        import torch

        return torch.zeros_like(batch.column("group"))


class BucketStd(Scale):
    """The standard deviation of all rollouts with the same value of some quantity, such as the prompt's difficulty."""

    equation: ClassVar[str] = "A = (r - b) / (std of the bucket + 1e-6)"
    source: ClassVar[str] = "Durian, arXiv 2602.21743"
    type: str = "bucket_std"
    by: str = option(description="quantity: a key of the prompts' metadata, or one of `mmrl.protocols.columns`")

    @property
    def needs(self) -> Needs:
        return needs_column(self.by)

    def buckets(self, batch: Batch) -> Tensor:
        return batch.column(self.by)


class NoScale(Scale):
    """No scale: differences are not divided."""

    equation: ClassVar[str] = "A = r - b"
    source: ClassVar[str] = "Dr.GRPO, arXiv 2503.20783"
    type: str = "none"

    def divide(self, differences: Tensor, rewards: Tensor, buckets: Tensor) -> Tensor:
        return differences

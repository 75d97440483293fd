"""Advantages within strata of a group."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.settings import option
from mmrl.terms.base import Shaper

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.facts import Batch


class Stratified(Shaper):
    """Rollouts are compared with those of their group that are built alike, such as those that called a tool as often,
    and the result is blended with the comparison with all."""

    equation: ClassVar[str] = (
        "A <- alpha (r - mean of the stratum) / (std of the stratum + 1e-6) + (1 - alpha) A; a stratum without two "
        "different rewards gives 0"
    )
    source: ClassVar[str] = "Stratified GRPO, arXiv 2510.06214"
    test: ClassVar[str] = "tests/joints/test_shapers.py"
    type: str = "stratified"
    by: str = option(description="the fact that makes strata: a key of metadata, or another of `mmrl.facts`")
    alpha: float = option(0.5, "weight of the comparison within the stratum", ge=0, le=1)

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        import torch

        from mmrl.core.advantages import group_advantages

        pairs = torch.stack([batch.fact("group").double(), batch.fact(self.by).double()], 1)
        stratum = pairs.unique(dim=0, return_inverse=True)[1]
        pairs_of_one = torch.bincount(stratum)[stratum] == 1
        rewards = batch.combined()
        # One rollout alone has nobody to be compared with, which is no mistake here.
        within, _ = group_advantages(rewards.where(~pairs_of_one, torch.nan), stratum)
        return self.alpha * batch.mine(within)[:, None] + (1 - self.alpha) * advantages

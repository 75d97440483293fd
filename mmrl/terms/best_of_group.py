"""Sampling more and learning from few."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from mmrl.settings import option
from mmrl.terms.base import Mask

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.facts import Batch


class BestOfGroup(Mask):
    """Of every group only the rollouts that are first by some measure are learned from and make up its statistics, such
    as the shortest ones, or those that earn the most a token."""

    equation: ClassVar[str] = "keep the `count` first of the group by the measure; of equal ones the earlier"
    source: ClassVar[str] = "GFPO, arXiv 2508.09726"
    test: ClassVar[str] = "tests/joints/test_masks.py"
    of: ClassVar[Literal["rollouts", "decisions"]] = "rollouts"
    type: str = "best_of_group"
    count: int = option(description="rollouts of a group that are kept", ge=1)
    by: str = option("length", "the fact that is measured; reward_per_length: the combined reward over the length")
    highest: bool = option(False, "keep the highest; false: the lowest")

    def keep(self, batch: Batch) -> Tensor:
        import torch

        group = batch.fact("group")
        measure = batch.combined() / batch.fact("length") if self.by == "reward_per_length" else batch.fact(self.by)
        order = measure.double().nan_to_num(-torch.inf if self.highest else torch.inf)
        order = -order if self.highest else order
        kept = torch.zeros(len(group), dtype=torch.bool)
        for g in group.unique():
            rows = (group == g).nonzero().flatten()
            kept[rows[order[rows].argsort(stable=True)[: self.count]]] = True
        return batch.mine(kept)

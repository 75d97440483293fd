"""As many decisions in every step."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.settings import option
from mmrl.terms.base import Mask

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.facts import Batch


class TokenBudget(Mask):
    """At most so many decisions of a step, drawn by chance, are learned from, so that a step of long responses is not a
    larger one."""

    equation: ClassVar[str] = "keep the decisions with the `budget` smallest draws, uniform, over all ranks"
    source: ClassVar[str] = "C3PO of Ring-lite, arXiv 2506.14731; that they are drawn one by one is ours"
    test: ClassVar[str] = "tests/joints/test_masks.py"
    type: str = "token_budget"
    budget: int = option(description="decisions of a step, over all ranks", unit="decisions", ge=1)

    def keep(self, batch: Batch) -> Tensor:
        import torch

        chance = torch.rand(batch.rollouts.mask.shape, generator=batch.generator(self.type))
        everyone = batch.decisions(chance).sort().values
        return chance <= everyone[min(self.budget, len(everyone)) - 1] if len(everyone) else chance >= 0

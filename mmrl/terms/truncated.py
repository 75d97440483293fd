"""Responses that were cut off."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from mmrl.terms.base import Mask

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.facts import Batch


class Truncated(Mask):
    """Rollouts that reached the longest length without an end leave the loss and their group's statistics."""

    equation: ClassVar[str] = "keep where the response ended by itself"
    source: ClassVar[str] = "overlong filtering, DAPO, arXiv 2503.14476"
    of: ClassVar[Literal["rollouts", "decisions"]] = "rollouts"
    type: str = "truncated"

    def keep(self, batch: Batch) -> Tensor:
        import torch

        return ~torch.tensor([sample.truncated for sample in batch.rollouts.samples])

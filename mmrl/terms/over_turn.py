"""Conversations that ran into a limit."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from mmrl.needs import Needs
from mmrl.terms.base import Mask

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.facts import Batch


class OverTurn(Mask):
    """Conversations that reached the limit of turns or of tokens leave the loss and their group's statistics, so that
    the policy is not taught to stop early and may use more turns later."""

    equation: ClassVar[str] = "keep where the response ended before the largest number of turns"
    source: ClassVar[str] = "over-turn masking, Mini-o3, arXiv 2509.07969"
    test: ClassVar[str] = "tests/joints/test_turn_credit.py"
    of: ClassVar[Literal["rollouts", "decisions"]] = "rollouts"
    type: str = "over_turn"

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"turns"}))

    def keep(self, batch: Batch) -> Tensor:
        import torch

        talks = [sample.conversation for sample in batch.rollouts.samples]
        return torch.tensor([talk is None or talk.end not in ("turns", "length") for talk in talks])

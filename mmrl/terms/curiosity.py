"""Advantages that favour tools."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.needs import Needs
from mmrl.settings import option
from mmrl.terms.base import Shaper

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.facts import Batch


class Curiosity(Shaper):
    """Where too few rollouts of a group use a tool, those that do get a bonus, as large as what is missing. Added to
    the advantages, for in the reward it would move the group's mean too."""

    equation: ClassVar[str] = "A + weight max(0, target - share) for rollouts that used a tool"
    source: ClassVar[str] = "Pixel Reasoner's curiosity, arXiv 2505.15966"
    test: ClassVar[str] = "tests/joints/test_turn_credit.py"
    type: str = "curiosity"
    target: float = option(0.3, "share of a group's rollouts that should use a tool", gt=0, le=1)
    weight: float = option(0.5, "of the bonus", gt=0)

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"turns"}))

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        import torch

        used = torch.tensor([float(uses_tool(s.conversation)) for s in batch.rollouts.samples])
        group = batch.rollouts.group
        share = torch.stack([used[group == g].mean() for g in group])
        bonus = self.weight * (self.target - share).clamp_min(0) * used * batch.kept
        batch.report({"curiosity/share": float(used.mean())})
        return advantages + bonus[:, None]


def uses_tool(conversation: object) -> bool:
    """Whether a tool was called and did what it was asked for."""
    from mmrl.rollouts import Conversation

    assert isinstance(conversation, Conversation)
    return any(turn.tool is not None and turn.error is None for turn in conversation.turns)

"""The measurement of sections: parts of a response between two texts, such as <think> and </think>."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from mmrl.protocols.abilities import DecisionTexts
from mmrl.protocols.measurement import CollectedContext, CollectedMeasurement

if TYPE_CHECKING:
    from mmrl.rollouts import DecisionColumn, Rollouts


@dataclass(frozen=True)
class SectionMembers(CollectedMeasurement["DecisionColumn"]):
    """The decisions of a response that belong to its section from `begin` to `end`, [rollout, decision] bool; see
    `section_bounds`. A decision that is partly in the section belongs to it."""

    begin: str
    end: str
    requires: ClassVar[type] = DecisionTexts
    cost: ClassVar[str] = ""

    @property
    def name(self) -> str:
        return f"section {self.begin!r} to {self.end!r}"

    def measure(self, rollouts: Rollouts, context: CollectedContext) -> DecisionColumn:
        """Returns the decisions of each response that are in the section."""
        import torch

        from mmrl.core.turns import character_shares
        from mmrl.rollouts import DecisionColumn

        members = torch.zeros(rollouts.mask.shape, dtype=torch.bool)
        for row, pieces in enumerate(context.policy.decision_texts(rollouts)):
            bounds = section_bounds("".join(pieces), self.begin, self.end)
            if bounds is not None:
                members[row, character_shares(pieces, [bounds])[0].long()] = True
        return DecisionColumn(members & rollouts.mask)


def section_bounds(text: str, begin: str, end: str) -> tuple[int, int] | None:
    """Returns the characters (first, last + 1) from the first `begin` to the first `end` after it, both included.

    An empty `begin` is the beginning of the text. An empty `end`, and one that does not occur, is the end of the text.
    Returns None if `begin` does not occur.
    """
    first = text.find(begin)
    if first < 0:
        return None
    last = text.find(end, first + len(begin)) if end else -1
    return first, len(text) if last < 0 else last + len(end)

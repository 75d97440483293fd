"""The measurement of named words in a response, such as those at which a model reconsiders."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, ClassVar

from mmrl.protocols.abilities import DecisionTexts
from mmrl.protocols.measurement import PreparedContext, PreparedMeasurement

if TYPE_CHECKING:
    from mmrl.rollouts import DecisionColumn, Rollouts


@dataclass(frozen=True)
class WordBeginnings(PreparedMeasurement["DecisionColumn"]):
    """The decisions at which one of `words` begins, [rollout, decision] bool; see `beginnings`."""

    words: tuple[str, ...]
    requires: ClassVar[type] = DecisionTexts
    cost: ClassVar[str] = "nothing"

    @property
    def name(self) -> str:
        return f"word beginnings {self.words}"

    def measure(self, rollouts: Rollouts, context: PreparedContext) -> DecisionColumn:
        import torch

        from mmrl.rollouts import DecisionColumn

        begins = torch.zeros(rollouts.mask.shape, dtype=torch.bool)
        for row, pieces in enumerate(context.policy.decision_texts(rollouts)):
            begins[row, beginnings(pieces, self.words)] = True
        return DecisionColumn(begins & rollouts.mask)


def beginnings(pieces: Sequence[str], words: Sequence[str]) -> list[int]:
    """Returns the indices of the pieces of a text that hold the first character of an occurrence of one of `words`, in
    rising order. An occurrence has no letter, digit or underscore directly before or after it."""
    pattern = "|".join(rf"(?<!\w){re.escape(word)}(?!\w)" for word in words)
    ends = list(accumulate(map(len, pieces)))
    return sorted({bisect_right(ends, match.start()) for match in re.finditer(pattern, "".join(pieces))})

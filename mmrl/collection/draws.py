"""Which prompts come next, on every rank its share, and what reads them ahead of time."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mmrl.collection.prefetch import ReadAhead
from mmrl.collection.settings import Demonstrations
from mmrl.engine import Ranks
from mmrl.prompts.sampler import Outcome
from mmrl.protocols.parts import Encoding, Policy, ReadableSource, Source
from mmrl.rollouts import Prompt


@dataclass(frozen=True)
class Draw:
    """A rank's share of a draw of prompts. positions: of the draw, over all ranks; indices: in the source."""

    positions: list[int]
    indices: list[int]


class PromptDraws:
    """The prompts of a run in the order in which its sampler draws them."""

    def __init__(self, settings: Demonstrations, source: Source, seed: int, policy: Policy, ranks: Ranks) -> None:
        self.reader = reader_of(source, policy)
        self.source: Source = source if self.reader is None else self.reader
        self.ranks, self.share = ranks, settings.prompts // ranks.world  # prompts of a rank in a step
        # A copy, for a default is shared by all configurations of the process.
        self.sampler = settings.sampler.model_copy(deep=True)
        self.sampler.look(self.source)
        self.sampler.start(len(self.source), seed)
        self.drawn = 0  # prompts drawn so far, over all ranks

    def draw(self, share: int | None = None) -> Draw:
        """This rank's share of the next prompts, as many on every rank; default: those of a step."""
        first, count = self.drawn, (self.share if share is None else share) * self.ranks.world
        indices = self.sampler.draw(count)
        self.drawn += count
        return Draw(self._own(range(first, first + count)), self._own(indices))

    def prompts(self, draw: Draw) -> list[Prompt]:
        return [self.source[index] for index in draw.indices]

    def foresee(self, *known: Draw) -> None:
        """Has prompts read that were drawn, and those that would be drawn next. A sampler may change its mind in
        between, by what it observes; then those are read for nothing."""
        if self.reader is not None:
            drawn = [index for draw in known for index in draw.indices]
            sampler = self.sampler.model_copy(deep=True)
            self.reader.expect([*drawn, *self._own(sampler.draw(self.share * self.ranks.world))])

    def observe(self, outcomes: list[Outcome]) -> None:
        self.sampler.observe(outcomes)

    def state(self) -> dict[str, Any]:
        return {"drawn": self.drawn, "sampler": copy.deepcopy(self.sampler.state())}

    def load(self, state: dict[str, Any]) -> None:
        self.drawn = state["drawn"]
        self.sampler.load(state["sampler"])

    def close(self) -> None:
        """Ends what reads ahead."""
        if self.reader is not None:
            self.reader.close()

    def _own(self, drawn: Sequence[int]) -> list[int]:
        share = len(drawn) // self.ranks.world
        return list(drawn[self.ranks.rank * share : (self.ranks.rank + 1) * share])


def reader_of(source: Source, policy: Policy) -> ReadAhead | None:
    """What reads ahead where the source asks for that; the policy learns of it."""
    if not isinstance(source, ReadableSource) or source.readers == 0:
        return None
    if not isinstance(policy, Encoding):
        return ReadAhead(source, None)
    found = ReadAhead(source, policy.encoder())
    policy.read_by(found)
    return found

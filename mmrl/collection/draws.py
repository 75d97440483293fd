"""Draws of prompts: each rank's share of the next prompts, and reading ahead."""

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
    """A rank's share of a draw of prompts. positions: in the sequence of draws over all ranks; indices: in the
    source."""

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
        self.sampler.inspect(self.source)
        self.sampler.start(len(self.source), seed)
        self.drawn = 0  # prompts drawn so far, over all ranks

    def draw(self, share: int | None = None) -> Draw:
        """Draws this rank's share of the next prompts, as many on every rank; default: those of a step."""
        first, count = self.drawn, (self.share if share is None else share) * self.ranks.world
        indices = self.sampler.draw(count)
        self.drawn += count
        return Draw(self._share_of(range(first, first + count)), self._share_of(indices))

    def prompts(self, draw: Draw) -> list[Prompt]:
        return [self.source[index] for index in draw.indices]

    def prefetch(self, *draws: Draw) -> None:
        """Starts reading prompts that were drawn, and those that would be drawn next. A sampler may draw others after
        it has observed outcomes; then they are read in vain."""
        if self.reader is not None:
            drawn = [index for draw in draws for index in draw.indices]
            sampler = self.sampler.model_copy(deep=True)
            self.reader.prefetch([*drawn, *self._share_of(sampler.draw(self.share * self.ranks.world))])

    def observe(self, outcomes: list[Outcome]) -> None:
        self.sampler.observe(outcomes)

    def state(self) -> dict[str, Any]:
        return {"drawn": self.drawn, "sampler": copy.deepcopy(self.sampler.state()), "observed": []}

    def load(self, state: dict[str, Any]) -> None:
        self.drawn = state["drawn"]
        self.sampler.load(state["sampler"])
        outcomes = [
            Outcome(prompt, tuple(rewards), tuple(marks)) for prompt, rewards, marks in state.get("observed", [])
        ]
        self.sampler.observe(outcomes)

    def close(self) -> None:
        """Closes the reader."""
        if self.reader is not None:
            self.reader.close()

    def _share_of(self, drawn: Sequence[int]) -> list[int]:
        share = len(drawn) // self.ranks.world
        return list(drawn[self.ranks.rank * share : (self.ranks.rank + 1) * share])


def reader_of(source: Source, policy: Policy) -> ReadAhead | None:
    """Returns a reader for a source with readers, and passes it to a policy that can encode ahead; None for other
    sources."""
    if not isinstance(source, ReadableSource) or source.readers == 0:
        return None
    if not isinstance(policy, Encoding):
        return ReadAhead(source, None)
    reader = ReadAhead(source, policy.encoder())
    policy.set_prompt_reader(reader)
    return reader

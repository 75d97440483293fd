"""The order of prompts in a run: which prompts each rank gets next, and reading them ahead of time."""

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
    """The prompts that a rank gets from one draw. positions: their positions in the order of all prompts of the run,
    over all ranks. indices: their indices in the data set."""

    positions: list[int]
    indices: list[int]


class PromptDraws:
    """The prompts of a run in the order that its prompt sampler decides, divided over the ranks."""

    def __init__(self, settings: Demonstrations, source: Source, seed: int, policy: Policy, ranks: Ranks) -> None:
        self.reader = make_reader(source, policy)
        self.source: Source = source if self.reader is None else self.reader
        self.ranks, self.share = ranks, settings.prompts // ranks.world  # prompts of a rank in a step
        # A copy, since default settings are shared by all configurations of the process.
        self.sampler = settings.sampler.model_copy(deep=True)
        self.sampler.inspect(self.source)
        self.sampler.start(len(self.source), seed)
        self.drawn = 0  # prompts drawn so far, over all ranks

    def draw(self, share: int | None = None) -> Draw:
        """Draws the next prompts and returns this rank's part. share: number of prompts per rank; None: that of a
        step."""
        first, total = self.drawn, (self.share if share is None else share) * self.ranks.world
        indices = self.sampler.draw(total)
        self.drawn += total
        return Draw(self._local_part(range(first, first + total)), self._local_part(indices))

    def prompts(self, draw: Draw) -> list[Prompt]:
        return [self.source[index] for index in draw.indices]

    def prefetch(self, *draws: Draw) -> None:
        """Starts reading the prompts of these draws, and those that the sampler, as it is now, would draw next. Rewards
        that it observes before the next draw may change its choice; prompts read in vain are then not used."""
        if self.reader is not None:
            drawn = [index for draw in draws for index in draw.indices]
            sampler = self.sampler.model_copy(deep=True)
            self.reader.prefetch([*drawn, *self._local_part(sampler.draw(self.share * self.ranks.world))])

    def observe(self, outcomes: list[Outcome]) -> None:
        """Passes the rewards of groups to the sampler."""
        self.sampler.observe(outcomes)

    def state(self) -> dict[str, Any]:
        return {"drawn": self.drawn, "sampler": copy.deepcopy(self.sampler.state()), "observed": []}

    def load(self, state: dict[str, Any]) -> None:
        self.drawn = state["drawn"]
        self.sampler.load(state["sampler"])
        # rewards that had been observed since the state was taken, see `PendingBatches.state`
        outcomes = [
            Outcome(prompt, tuple(rewards), tuple(accuracies))
            for prompt, rewards, accuracies in state.get("observed", [])
        ]
        self.sampler.observe(outcomes)

    def close(self) -> None:
        """Closes the reader."""
        if self.reader is not None:
            self.reader.close()

    def _local_part(self, numbers: Sequence[int]) -> list[int]:
        """Returns this rank's part of a sequence that is divided over the ranks in order."""
        share = len(numbers) // self.ranks.world
        return list(numbers[self.ranks.rank * share : (self.ranks.rank + 1) * share])


def make_reader(source: Source, policy: Policy) -> ReadAhead | None:
    """Returns a reader that reads the source ahead of time in other processes; None for a source that cannot or should
    not be read in other processes. A policy that can encode prompts there gets the reader."""
    if not isinstance(source, ReadableSource) or source.readers == 0:
        return None
    if not isinstance(policy, Encoding):
        return ReadAhead(source, None)
    reader = ReadAhead(source, policy.encoder())
    policy.set_prompt_reader(reader)
    return reader

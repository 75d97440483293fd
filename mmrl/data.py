"""Which prompts a step gets: an endless, seeded, resumable order over a map-style source."""

from __future__ import annotations

from functools import lru_cache
from typing import Protocol

import numpy as np

from mmrl.rollouts import Prompt


class Source(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Prompt: ...


class PromptStream:
    """Position p of the stream is item `order(p // len)[p % len]`, a new permutation each epoch.

    The whole state is one integer, so a resume is exact, at the edge of an epoch too.
    """

    def __init__(self, source: Source, seed: int) -> None:
        self.source = source
        self.seed = seed
        self._order = lru_cache(maxsize=2)(self._permutation)

    def __getitem__(self, position: int) -> Prompt:
        epoch, place = divmod(position, len(self.source))
        return self.source[int(self._order(epoch)[place])]

    def _permutation(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self.seed, epoch]).permutation(len(self.source))


def rollout_seeds(seed: int, positions: list[int], group_size: int) -> list[int]:
    """One seed a rollout, from the prompt's position in the stream and the rollout's place in its group."""
    return [
        int(np.random.SeedSequence([seed, position, member]).generate_state(1)[0])
        for position in positions
        for member in range(group_size)
    ]

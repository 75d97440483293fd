"""Seeds of rollouts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def rollout_seeds(seed: int, positions: Sequence[int], group_size: int) -> list[int]:
    """One seed a rollout, from the place at which its prompt was drawn and the rollout's place in its group."""
    return [
        int(np.random.SeedSequence([seed, position, member]).generate_state(1)[0])
        for position in positions
        for member in range(group_size)
    ]


REFERENCE = 2**32 - 1  # no place in a response; numpy takes a trailing 0 for nothing


def reference_seeds(seed: int, positions: Sequence[int]) -> list[int]:
    """Of one response of the reference policy to each prompt, other than those of its rollouts."""
    return [int(np.random.SeedSequence([seed, position, 0, REFERENCE]).generate_state(1)[0]) for position in positions]


def continuation_seeds(seed: int, position: int, member: int, cut: int, count: int) -> list[int]:
    """Of so many continuations of a rollout after its first `cut` decisions."""
    words = ([seed, position, member, cut, i] for i in range(count))
    return [int(np.random.SeedSequence(each).generate_state(1)[0]) for each in words]

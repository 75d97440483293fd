"""Seeds of rollouts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def rollout_seeds(seed: int, positions: Sequence[int], group_size: int) -> list[int]:
    """Returns one seed for each rollout, from the position at which its prompt was drawn and its index in its group."""
    return [
        int(np.random.SeedSequence([seed, position, member]).generate_state(1)[0])
        for position in positions
        for member in range(group_size)
    ]


# In place of `cut`, for the reference policy: larger than any number of decisions. 0 would have no effect, since
# SeedSequence ignores trailing zeros.
REFERENCE = 2**32 - 1


def reference_seeds(seed: int, positions: Sequence[int]) -> list[int]:
    """Returns a seed for one response of the reference policy to each prompt, distinct from those of its rollouts."""
    return [int(np.random.SeedSequence([seed, position, 0, REFERENCE]).generate_state(1)[0]) for position in positions]


def continuation_seeds(seed: int, position: int, member: int, cut: int, count: int) -> list[int]:
    """Returns the seeds of `count` continuations of a rollout after its first `cut` decisions."""
    entropies = ([seed, position, member, cut, i] for i in range(count))
    return [int(np.random.SeedSequence(entropy).generate_state(1)[0]) for entropy in entropies]

"""Chains whose rollouts step from the same states: at every step a group draws candidates, and continues from one of
them or from a step without noise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from mmrl.samplers.chain import Chain, derive_seed

CHOSEN = 8000  # offset of the random numbers that choose the candidate to continue from
Segment = Callable[[Tensor, list[int], list[int], list[list[int]], list[int], list[int]], Chain]


def grow(
    segment: Segment,
    noise: Tensor,
    seeds: Sequence[int],
    windows: list[list[int]],
    size: int,
    last: int,
    trunk: Literal["candidate", "ode"] = "candidate",
) -> Chain:
    """Draws `size` rollouts of each prompt, which share the state before every step of the window.

    segment(x, owner, seeds, windows, start, stop): a chain for the rows of prompts `owner`. noise: [prompt, ...] pure
    noise; seeds: one a rollout; windows: steps without gaps, one list a prompt, all of the same length; last: grid
    points. With trunk "candidate" the next state is that of a candidate which is drawn from the first seed of a group,
    with "ode" that of a deterministic step.
    """
    count, width = len(noise), len(windows[0])
    prompts, roots = list(range(count)), [int(seed) for seed in seeds[::size]]
    rows = [g for g in prompts for _ in range(size)]
    none: list[list[int]] = [[]] * count
    x = segment(noise, prompts, roots, none, [0] * count, [window[0] for window in windows]).final
    before, after = [], []
    for k in range(width):
        at = [window[k] for window in windows]
        start = [at[g] for g in rows]
        apart = x.repeat_interleave(size, 0)
        drawn = segment(apart, rows, [int(s) for s in seeds], [[p] for p in start], start, [p + 1 for p in start])
        before.append(apart)
        after.append(drawn.final)
        if trunk == "ode":
            x = segment(x, prompts, roots, none, at, [p + 1 for p in at]).final
        else:
            chosen = [g * size + derive_seed(roots[g], CHOSEN + at[g]) % size for g in prompts]
            x = drawn.final[torch.tensor(chosen, device=drawn.final.device)]
    ends = [windows[g][-1] + 1 for g in rows]
    nobody: list[list[int]] = [[]] * len(rows)
    final = segment(after[-1], rows, [int(s) for s in seeds], nobody, ends, [last] * len(rows)).final
    return Chain(final, torch.stack(before, 1), torch.stack(after, 1))

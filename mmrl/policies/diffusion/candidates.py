"""Groups of chains that share their states: at each step of the window, every rollout of a group samples a next state
from the same state, and the group continues from one of these candidates or from a step without noise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from mmrl.samplers.chain import Chain, derive_seed

# Offset of the random numbers that select the candidate to continue from: they must differ from those of the noises
SELECTION_OFFSET = 8000
# Runs a part of a chain per row, as `trees.Segment` does, but each row has a list of stochastic steps.
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
    """Samples `size` rollouts per prompt, which share the state before each step of the window. Steps outside the
    window are deterministic.
    segment: runs parts of chains; its arguments are latents [row, ...], and for each row the index of its prompt, its
    seed, its stochastic steps, and the grid points at which it starts and stops. noise: pure noise, [prompt, ...].
    seeds: one per rollout. windows: consecutive steps, one list per prompt, all of the same length. last: the grid
    point at which chains end. trunk: the group continues from a random candidate ("candidate"), or from a deterministic
    step ("ode")."""
    num_prompts, width = len(noise), len(windows[0])
    prompts, group_seeds = list(range(num_prompts)), [int(seed) for seed in seeds[::size]]
    row_prompts, row_seeds = [g for g in prompts for _ in range(size)], [int(seed) for seed in seeds]
    no_steps: list[list[int]] = [[]] * num_prompts
    # deterministic steps before the window: one chain per prompt
    x = segment(noise, prompts, group_seeds, no_steps, [0] * num_prompts, [window[0] for window in windows]).final
    states, next_states = [], []
    for k in range(width):
        step = [window[k] for window in windows]
        start = [step[g] for g in row_prompts]
        state = x.repeat_interleave(size, 0)
        candidates = segment(state, row_prompts, row_seeds, [[p] for p in start], start, [p + 1 for p in start]).final
        states.append(state)
        next_states.append(candidates)
        # x: the state that the group shares before the next step
        if trunk == "ode":
            x = segment(x, prompts, group_seeds, no_steps, step, [p + 1 for p in step]).final
        else:
            # the seed of the group and the step draw the candidate, 0 to size - 1, of each group
            selected = [g * size + derive_seed(group_seeds[g], SELECTION_OFFSET + step[g]) % size for g in prompts]
            x = candidates[torch.tensor(selected, device=candidates.device)]
    # deterministic steps after the window: one chain per rollout
    window_ends = [windows[g][-1] + 1 for g in row_prompts]
    no_row_steps: list[list[int]] = [[]] * len(row_prompts)
    final = segment(next_states[-1], row_prompts, row_seeds, no_row_steps, window_ends, [last] * len(row_prompts)).final
    return Chain(final, torch.stack(states, 1), torch.stack(next_states, 1))

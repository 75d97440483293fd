"""The states of a masked response whose likelihoods are known, and what its likelihood is made of.

Everything here is a function of a rollout's seed and trace: no model, and nothing that changes between the old, the
present and the reference policy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class States:
    """States of one rollout that the model is shown."""

    empty: Tensor  # [state, place] bool, places of the response that are masked
    weight: Tensor  # [state, place] float32, of the place's log-likelihood in this state; 0 where it is not empty
    prompt_empty: Tensor | None = None  # [state, token] bool, tokens of the prompt that are masked; None: none
    order: Tensor | None = None  # [place] a place is asked about with those in sight that have a lower number, all in
    # one pass; there is one state then
    noise: Tensor | None = None  # [state, place] 0 to 1, which tokens stand in empty places; None: mask tokens
    blocks: Tensor | None = None  # [place] the block of a place: what has empty places stands behind the response, each
    # block of it with the blocks before it in sight, see `by_blocks`


def one_step(seed: int, prompt: int, length: int, prompt_mask: float) -> States:
    """All places are empty, and each of `prompt` tokens with the chance `prompt_mask`."""
    hidden = torch.rand(1, prompt, generator=_generator(seed)) < prompt_mask
    return States(torch.ones(1, length, dtype=torch.bool), torch.ones(1, length), hidden)


def coupled(seed: int, length: int, pairs: int, levels: tuple[float, float]) -> States:
    """The empty response, then pairs of states. In the first of a pair each place is empty with a chance between
    `levels`, in the second the others are."""
    generator, (low, high) = _generator(seed), levels
    share = low + (high - low) * torch.rand(pairs, 1, generator=generator)
    first = torch.rand(pairs, length, generator=generator) < share
    empty = torch.cat([torch.ones(1, length, dtype=torch.bool), torch.stack([first, ~first], 1).flatten(0, 1)])
    return States(empty, empty.float() / (pairs + 1))


def elbo(seed: int, length: int, draws: int, antithetic: bool = False) -> States:
    """In draw j of n, l places are empty, l from the j-th of n equal parts of 1 to `length`; any l places alike.

    antithetic: draws come in pairs, which share out the parts; in the second of a pair length + 1 - l places are empty,
    those that are not in the first, and one of those that are.
    """
    generator, parts = _generator(seed), draws // 2 if antithetic else draws
    uniform = (torch.arange(parts) + torch.rand(parts, generator=generator)) / parts
    count = (uniform * length).long().clamp(max=length - 1) + 1  # 1 to length, alike
    rank = torch.rand(parts, length, generator=generator).argsort(1).argsort(1)
    empty = rank < count[:, None]
    if antithetic:
        empty = torch.stack([empty, rank >= count[:, None] - 1], 1).flatten(0, 1)
        count = empty.sum(1)
    return States(empty, empty * (length / (count[:, None] * draws)).float())


def spread(seed: int, length: int, draws: int) -> States:
    """In state j of n each place is empty with the chance (u + j / n) mod 1, u drawn once, and one place at least. A
    place is asked about in the states in which it is empty, all alike; one that is empty in none has no likelihood."""
    generator = _generator(seed)
    level = (torch.rand(1, generator=generator) + torch.arange(draws) / draws) % 1
    chance = torch.rand(draws, length, generator=generator)
    empty = (chance < level[:, None]) | (chance == chance.amin(1, keepdim=True))
    return States(empty, empty / empty.sum(0).clamp(min=1))


def staircase(seed: int, blocks: Tensor, draws: int) -> States:
    """In every state l places of each block of n are empty, l from 1 to n alike; any l places alike.
    blocks: [place]."""
    generator, empty = _generator(seed), torch.zeros(draws, len(blocks), dtype=torch.bool)
    weight = torch.zeros(draws, len(blocks))
    for block in blocks.unique().tolist():
        places = (blocks == block).nonzero().flatten()
        count = torch.randint(1, len(places) + 1, (draws, 1), generator=generator)
        rank = torch.rand(draws, len(places), generator=generator).argsort(1).argsort(1)
        empty[:, places] = rank < count
        weight[:, places] = (rank < count) * (len(places) / (count * draws)).float()
    return States(empty, weight, blocks=blocks)


def by_blocks(prompt: int, blocks: Tensor, width: int, *, noised: bool) -> tuple[Tensor, Tensor]:
    """Which tokens each token sees, [token, token] bool, and their positions [token], of a prompt of so many tokens, a
    response whose places are of `blocks` [place], with `noised` a copy of it with empty places, and padding to `width`.

    A prompt sees itself; a place sees the prompt, the blocks before its own, and its own block: that of the response,
    or of the copy, whose places see earlier blocks in the response."""
    n, seen, positions = len(blocks), torch.eye(width, dtype=torch.bool), torch.zeros(width, dtype=torch.long)
    whole, places = prompt + n * (1 + noised), torch.arange(prompt, prompt + n)
    response = slice(prompt, prompt + n)
    seen[:whole, :prompt] = True
    seen[response, response] = blocks[:, None] >= blocks
    if noised:
        seen[prompt + n : whole, response] = blocks[:, None] > blocks
        seen[prompt + n : whole, prompt + n : whole] = blocks[:, None] == blocks
    positions[:whole] = torch.cat([torch.arange(prompt), *[places] * (1 + noised)])
    return seen, positions


def trace(steps: Tensor, last: int, shrink: int) -> States:
    """One state for `shrink` steps: that before the first of them. steps: [place] the step, 0 to last - 1, in which a
    place was filled."""
    number = torch.arange(-(-last // shrink))[:, None]
    part = (steps // shrink)[None]
    return States(part >= number, (part == number).float())


def step_merge(steps: Tensor, last: int, segments: int) -> States:
    """One state for each of `segments` runs of steps that are as equally long as can be: that before the first step of
    it. steps, last: as in `trace`."""
    segments = min(segments, last)
    part = ((steps + 1) * segments - 1) // last  # the segment of a step: 0 to segments - 1
    number = torch.arange(segments)[:, None]
    return States(part[None] >= number, (part[None] == number).float())


def any_order(steps: Tensor) -> States:
    """One pass in which every place sees what was filled before it. steps: as in `trace`."""
    everywhere = torch.ones(1, len(steps), dtype=torch.bool)
    return States(everywhere, everywhere.float(), order=steps)


def moments(states: States) -> Tensor:
    """[place] int64, in which of the states a place is asked about, or when it was filled where all are asked in one
    pass. Of likelihoods that follow the trace."""
    return states.weight.argmax(0) if states.order is None else states.order


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)

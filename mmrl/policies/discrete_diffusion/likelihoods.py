"""States in which the model scores a masked response, and the weights with which its likelihood is estimated.

Everything here is a function of a rollout's seed and trace: no model, and nothing that changes between the old, the
present and the reference policy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class States:
    """States of one rollout in which the model scores its response."""

    empty: Tensor  # [state, position] bool, positions of the response that are masked
    weight: Tensor  # [state, position] fp32, of the log-likelihood in this state; 0 where it is not empty
    prompt_empty: Tensor | None = None  # [state, token] bool, tokens of the prompt that are masked; None: none
    # [position] each position is scored seeing those of lower order, all in one pass; there is one state then
    order: Tensor | None = None
    # [state, position] in [0, 1), the token at an empty position, see `UniformPolicy`; None: mask tokens
    noise: Tensor | None = None
    # [position] the block of each; the noised response stands behind the response, see `by_blocks`
    blocks: Tensor | None = None


def one_step(seed: int, prompt: int, length: int, prompt_mask: float) -> States:
    """Masks all positions, and each of `prompt` tokens with the chance `prompt_mask`."""
    hidden = torch.rand(1, prompt, generator=_generator(seed)) < prompt_mask
    return States(torch.ones(1, length, dtype=torch.bool), torch.ones(1, length), hidden)


def coupled(seed: int, length: int, pairs: int, levels: tuple[float, float]) -> States:
    """Masks the whole response, then makes pairs of states: in the first of a pair each position is masked with a
    chance t between `levels`, in the second the other positions are. A score is divided by the chance of its mask, t
    or 1 - t; the mean over pairs and the score of the whole response count one half each."""
    generator, (low, high) = _generator(seed), levels
    share = low + (high - low) * torch.rand(pairs, 1, generator=generator)
    first = torch.rand(pairs, length, generator=generator) < share
    states = torch.stack([first, ~first], 1)  # [pair, 2, position]
    chance = torch.stack([share, 1 - share], 1)  # [pair, 2, 1]
    whole = torch.ones(1, length)
    weight = torch.cat([whole / 2, (states / (2 * pairs * chance)).flatten(0, 1)])
    return States(torch.cat([whole.bool(), states.flatten(0, 1)]), weight)


def elbo(seed: int, length: int, draws: int, antithetic: bool = False) -> States:
    """Masks l positions in draw j of n, l from the j-th of n equal parts of 1 to `length`; any l positions alike.

    antithetic: draws come in pairs, which share out the parts; in the second of a pair length + 1 - l positions are
    masked, those that are not in the first, and one of those that are.
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
    """Masks each position in state j of n with the chance (u + j / n) mod 1, u drawn once, and one position at least. A
    position is scored in the states in which it is masked, with equal weights; one that is masked in none has no
    likelihood."""
    generator = _generator(seed)
    level = (torch.rand(1, generator=generator) + torch.arange(draws) / draws) % 1
    chance = torch.rand(draws, length, generator=generator)
    empty = (chance < level[:, None]) | (chance == chance.amin(1, keepdim=True))
    return States(empty, empty / empty.sum(0).clamp(min=1))


def staircase(seed: int, blocks: Tensor, draws: int) -> States:
    """Masks l positions of each block of n in every state, l from 1 to n alike; any l positions alike. blocks:
    [position]."""
    generator, empty = _generator(seed), torch.zeros(draws, len(blocks), dtype=torch.bool)
    weight = torch.zeros(draws, len(blocks))
    for block in blocks.unique().tolist():
        positions = (blocks == block).nonzero().flatten()
        count = torch.randint(1, len(positions) + 1, (draws, 1), generator=generator)
        rank = torch.rand(draws, len(positions), generator=generator).argsort(1).argsort(1)
        empty[:, positions] = rank < count
        weight[:, positions] = (rank < count) * (len(positions) / (count * draws)).float()
    return States(empty, weight, blocks=blocks)


def by_blocks(prompt: int, blocks: Tensor, width: int, *, noised: bool) -> tuple[Tensor, Tensor]:
    """Returns an attention mask [token, token] bool and position ids [token] of a prompt of so many tokens, a response
    with `blocks` [position], with `noised` a noised copy of it, and padding to `width`.

    A prompt sees itself. A position sees the prompt, the blocks before its own, and its own block: that of the
    response, or of the copy, whose positions see earlier blocks in the response.
    """
    n, attention, positions = len(blocks), torch.eye(width, dtype=torch.bool), torch.zeros(width, dtype=torch.long)
    whole, response_positions = prompt + n * (1 + noised), torch.arange(prompt, prompt + n)
    response = slice(prompt, prompt + n)
    attention[:whole, :prompt] = True
    attention[response, response] = blocks[:, None] >= blocks
    if noised:
        attention[prompt + n : whole, response] = blocks[:, None] > blocks
        attention[prompt + n : whole, prompt + n : whole] = blocks[:, None] == blocks
    positions[:whole] = torch.cat([torch.arange(prompt), *[response_positions] * (1 + noised)])
    return attention, positions


def trace(steps: Tensor, last: int, shrink: int) -> States:
    """Makes one state for `shrink` steps that filled a position: that before the first of them. steps: [position] the
    step, 0 to last - 1, in which a position was filled; a threshold leaves gaps in them."""
    number = torch.arange(-(-last // shrink))[:, None]
    part = (steps.unique(return_inverse=True)[1] // shrink)[None]
    return States(part >= number, (part == number).float())


def step_merge(steps: Tensor, last: int, segments: int) -> States:
    """Makes one state for each of `segments` runs of steps of the same length, as far as that goes: that before the
    first step of it. steps, last: as in `trace`."""
    segments = min(segments, last)
    part = ((steps + 1) * segments - 1) // last  # the segment of a step: 0 to segments - 1
    number = torch.arange(segments)[:, None]
    return States(part[None] >= number, (part[None] == number).float())


def any_order(steps: Tensor) -> States:
    """Makes one state for one pass in which every position sees what was filled before it. steps: as in `trace`."""
    everywhere = torch.ones(1, len(steps), dtype=torch.bool)
    return States(everywhere, everywhere.float(), order=steps)


def moments(states: States) -> Tensor:
    """Returns the state in which each position is scored, [position] int64, or the step in which it was filled where
    all are scored in one pass. For likelihoods that follow the trace."""
    return states.weight.argmax(0) if states.order is None else states.order


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)

"""The states (partly masked copies) in which a masked diffusion model scores a response, and their weights in the
estimate of its log-likelihood.

All functions depend only on the seed of a rollout and on its trace, the step in which each position was filled. So the
old, the current and the reference policy score a response in the same states.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class States:
    """The states in which the model scores the response of one rollout."""

    masked: Tensor  # [state, position] bool, positions of the response that are masked
    weight: Tensor  # [state, position] fp32, of the token's log-probability in this state; 0 if it is not scored
    prompt_masked: Tensor | None = None  # [state, token] bool, tokens of the prompt that are masked; None: none
    # [position], the step in which it was filled: a single state scores all positions in one pass, each given the
    # positions of earlier steps
    order: Tensor | None = None
    # [state, position] in [0, 1): random tokens at masked positions, see `UniformPolicy`; None: mask tokens
    noise: Tensor | None = None
    # [position], the block of each; the noised copy comes after the response in one row, see `block_attention`
    blocks: Tensor | None = None


def one_step(seed: int, prompt_length: int, length: int, prompt_mask: float) -> States:
    """Returns one state: all `length` positions of the response are masked, and each prompt token with probability
    `prompt_mask`."""
    prompt_masked = torch.rand(1, prompt_length, generator=_generator(seed)) < prompt_mask
    return States(torch.ones(1, length, dtype=torch.bool), torch.ones(1, length), prompt_masked)


def coupled(seed: int, length: int, pairs: int, levels: tuple[float, float]) -> States:
    """Returns a fully masked state, then `pairs` pairs of states with complementary masks.

    In the first state of a pair each position is masked with a probability t from `levels`, in the second state the
    other positions are masked. The estimate is half the score in the fully masked state and half the mean over pairs;
    in a pair a score is divided by the probability of its mask, t or 1 - t.
    """
    generator, (low, high) = _generator(seed), levels
    mask_ratio = low + (high - low) * torch.rand(pairs, 1, generator=generator)
    first_mask = torch.rand(pairs, length, generator=generator) < mask_ratio
    masks = torch.stack([first_mask, ~first_mask], 1)  # [pair, 2, position]
    probability = torch.stack([mask_ratio, 1 - mask_ratio], 1)  # [pair, 2, 1]
    full_mask = torch.ones(1, length)
    weight = torch.cat([full_mask / 2, (masks / (2 * pairs * probability)).flatten(0, 1)])
    return States(torch.cat([full_mask.bool(), masks.flatten(0, 1)]), weight)


def elbo(seed: int, length: int, num_states: int, antithetic: bool = False) -> States:
    """Returns states for the evidence lower bound. In state j of n, l positions are masked, with l uniform in the j-th
    of n equal parts of 1 to `length`; the masked positions are a uniform random choice.

    antithetic: states come in pairs, with n / 2 parts. If l positions are masked in the first state of a pair, length
    + 1 - l are masked in the second: all positions that are not masked in the first, and one that is.
    """
    generator, parts = _generator(seed), num_states // 2 if antithetic else num_states
    uniform = (torch.arange(parts) + torch.rand(parts, generator=generator)) / parts
    num_masked = (uniform * length).long().clamp(max=length - 1) + 1  # uniform in 1 to length
    rank = torch.rand(parts, length, generator=generator).argsort(1).argsort(1)  # a random permutation in each row
    masked = rank < num_masked[:, None]
    if antithetic:
        masked = torch.stack([masked, rank >= num_masked[:, None] - 1], 1).flatten(0, 1)
        num_masked = masked.sum(1)
    return States(masked, masked * (length / (num_masked[:, None] * num_states)).float())


def spread(seed: int, length: int, num_states: int) -> States:
    """Returns states with evenly spread mask ratios: state j of n masks each position with probability (u + j / n) mod
    1, with one uniform u, and at least one position.

    A position's estimate is the mean over the states in which it is masked; it is 0 if there are none.
    """
    generator = _generator(seed)
    mask_ratio = (torch.rand(1, generator=generator) + torch.arange(num_states) / num_states) % 1
    uniform = torch.rand(num_states, length, generator=generator)
    masked = (uniform < mask_ratio[:, None]) | (uniform == uniform.amin(1, keepdim=True))
    return States(masked, masked / masked.sum(0).clamp(min=1))


def staircase(seed: int, blocks: Tensor, num_states: int) -> States:
    """Returns states for the evidence lower bound block by block: each state masks l of the n positions of every block,
    with l uniform in 1 to n; the masked positions are a uniform random choice.

    The log-probability of a masked position has the weight n / (l * num_states), so that their weighted sum is an
    unbiased estimate of the bound. blocks: [position], the block of each.
    """
    generator, masked = _generator(seed), torch.zeros(num_states, len(blocks), dtype=torch.bool)
    weight = torch.zeros(num_states, len(blocks))
    for block in blocks.unique().tolist():
        positions = (blocks == block).nonzero().flatten()
        num_masked = torch.randint(1, len(positions) + 1, (num_states, 1), generator=generator)
        # a random permutation in each row
        rank = torch.rand(num_states, len(positions), generator=generator).argsort(1).argsort(1)
        masked[:, positions] = rank < num_masked
        weight[:, positions] = (rank < num_masked) * (len(positions) / (num_masked * num_states)).float()
    return States(masked, weight, blocks=blocks)


def block_attention(prompt_length: int, blocks: Tensor, width: int, *, noised: bool) -> tuple[Tensor, Tensor]:
    """Returns the attention mask [token, token] bool and position ids [token] of a block diffusion model, for a row of
    prompt, response, a noised copy of the response if `noised`, and padding.

    Prompt tokens attend to the prompt. A response token attends to the prompt, to earlier blocks of the response and to
    its own block. A token of the noised copy attends to the prompt, to earlier blocks of the response, and to its own
    block in the copy. blocks: [position], the block of each position of the response. width: tokens of the row.
    """
    n, attention, positions = len(blocks), torch.eye(width, dtype=torch.bool), torch.zeros(width, dtype=torch.long)
    length = prompt_length + n * (1 + noised)  # without padding
    response_positions = torch.arange(prompt_length, prompt_length + n)
    response, copy = slice(prompt_length, prompt_length + n), slice(prompt_length + n, length)
    attention[:length, :prompt_length] = True
    attention[response, response] = blocks[:, None] >= blocks
    if noised:
        attention[copy, response] = blocks[:, None] > blocks
        attention[copy, copy] = blocks[:, None] == blocks
    positions[:length] = torch.cat([torch.arange(prompt_length), *[response_positions] * (1 + noised)])
    return attention, positions


def trace(steps: Tensor, num_steps: int, shrink: int) -> States:
    """Returns the states of sampling in which tokens were filled in, with `shrink` consecutive steps merged into one
    state: the state before the first of these steps.

    steps: [position] int64, the step in which a position was filled, 0 to num_steps - 1. Steps that filled no
    position, because a threshold filled positions early, do not count.
    """
    state = torch.arange(-(-num_steps // shrink))[:, None]  # their number is num_steps / shrink, rounded up
    # unique numbers the steps that filled positions from 0
    scored_in = (steps.unique(return_inverse=True)[1] // shrink)[None]
    return States(scored_in >= state, (scored_in == state).float())


def step_merge(steps: Tensor, num_steps: int, segments: int) -> States:
    """Returns the states of sampling before each of `segments` segments of steps, of equal length up to rounding.

    steps, num_steps: see `trace`.
    """
    segments = min(segments, num_steps)
    scored_in = ((steps + 1) * segments - 1) // num_steps  # the segment of a step: 0 to segments - 1
    state = torch.arange(segments)[:, None]
    return States(scored_in[None] >= state, (scored_in[None] == state).float())


def any_order(steps: Tensor) -> States:
    """Returns one state, which scores each position given the positions that were filled before it, all in one pass.
    steps: see `trace`."""
    all_masked = torch.ones(1, len(steps), dtype=torch.bool)
    return States(all_masked, all_masked.float(), order=steps)


def scoring_state_index(states: States) -> Tensor:
    """Returns the index of the state in which each position is scored, [position] int64; for `any_order` the step in
    which it was filled. Only for estimates that follow the trace, which score each position once."""
    return states.weight.argmax(0) if states.order is None else states.order


def _generator(seed: int) -> torch.Generator:
    """Returns a new CPU generator with this seed."""
    return torch.Generator().manual_seed(seed)

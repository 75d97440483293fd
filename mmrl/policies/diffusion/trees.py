"""Trees of denoising chains (BranchGRPO, arXiv 2509.06040): a group starts from one noise and branches in the
window."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from einops import repeat
from torch import Tensor

from mmrl.samplers.chain import Chain, derive_seed

# Runs a part of a chain per row. Arguments: latents [row, ...]; then per row its group, its seed, its stochastic step
# (or None for all rows), and the grid points at which it starts and stops.
Segment = Callable[[Tensor, list[int], list[int], list[int] | None, list[int], list[int]], Chain]


def sharing_leaves(branching: Sequence[int], width: int) -> list[int]:
    """Returns for each of the `width` decisions of a chain the number of leaves that share it. branching: children at
    each step of the window; 1 at steps beyond it."""
    children = [*branching, *[1] * (width - len(branching))]
    return [math.prod(children[j + 1 :]) for j in range(width)]


def decision_weights(branching: Sequence[int], width: int) -> Tensor:
    """Returns the weights of decisions, [decision]: 1 / number of leaves that share the decision, scaled to mean 1.

    Each leaf is a rollout with its full chain, so a shared decision is part of several rollouts. With these weights
    each node of the tree has the same weight in the loss.
    """
    share = 1 / torch.tensor(sharing_leaves(branching, width), dtype=torch.float32)
    return share / share.mean()


def node_ids(branching: Sequence[int], width: int, group_size: int, groups: int) -> Tensor:
    """Returns the tree node of each decision, [rollout, decision] int64. Rollouts of a group with the same id share the
    decision. width: decisions of a rollout."""
    leaf = torch.arange(group_size).repeat(groups)
    return torch.stack([leaf // shared for shared in sharing_leaves(branching, width)], 1)


def grow(
    segment: Segment, noise: Tensor, seeds: list[int], windows: list[list[int]], branching: Sequence[int], last: int
) -> Chain:
    """Samples one tree of chains from each row of `noise` [group, ...]. The leaves of a group are adjacent rows.
    Steps before and after the window are deterministic; at each step of the window every chain is continued by as many
    children as `branching` says. segment: runs parts of chains; its arguments are latents [row, ...], and for each row
    its group, its seed, its stochastic step (None: no row has one), and the grid points at which it starts and stops.
    seeds: one per group. windows: the steps of the window, one list per group. last: the grid point at which chains
    end."""
    width, groups = len(windows[0]), range(len(seeds))
    children = [*branching, *[1] * (width - len(branching))]
    chain = segment(noise, [*groups], seeds, None, [0] * len(seeds), [window[0] for window in windows])
    steps: list[Tensor] = []  # for each step of the window the states before and after it, [2, chain, ...]
    for j, k in enumerate(children):  # k children of every chain at step j of the window
        num_chains = math.prod(children[: j + 1])  # per group
        group = [g for g in groups for _ in range(num_chains)]
        child_seeds = [derive_seed(seeds[g], n) for g in groups for n in range(num_chains)]
        start = [windows[g][j] for g in group]
        stop = [windows[g][j + 1] if j + 1 < width else last for g in group]
        chain = segment(repeat(chain.final, "b ... -> (b k) ...", k=k), group, child_seeds, start, start, stop)
        steps.append(torch.stack([chain.x, chain.x_next]))
    leaves = sharing_leaves(branching, width)
    # every leaf gets the states of all chains that it continues: [2, leaf, step of the window, ...]
    per_leaf = [repeat(step, "two b ... -> two (b k) ...", k=k) for step, k in zip(steps, leaves, strict=True)]
    x, x_next = torch.cat(per_leaf, 2)
    return Chain(chain.final, x, x_next)

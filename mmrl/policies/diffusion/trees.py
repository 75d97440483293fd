"""Trees of chains (BranchGRPO, arXiv 2509.06040): a group begins with one noise and branches inside the window."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from einops import repeat
from torch import Tensor

from mmrl.samplers.chain import Chain, derive_seed

# (latents [row, ...]; each row's group, seed, step that it draws or None, first and last grid point) -> its chain
Segment = Callable[[Tensor, list[int], list[int], list[int] | None, list[int], list[int]], Chain]


def sharing_leaves(branching: Sequence[int], width: int) -> list[int]:
    """Returns the number of leaves that share each of the `width` decisions of a chain."""
    children = [*branching, *[1] * (width - len(branching))]
    return [math.prod(children[j + 1 :]) for j in range(width)]


def decision_weights(branching: Sequence[int], width: int) -> Tensor:
    """Returns [decision]: 1 over the number of leaves that share a decision, scaled to mean 1 over all decisions.

    Every leaf holds its whole chain, so that a shared decision is in several rollouts. With these weights each node of
    the tree has the same share in the loss under every reduction.
    """
    share = 1 / torch.tensor(sharing_leaves(branching, width), dtype=torch.float32)
    return share / share.mean()


def nodes_of(branching: Sequence[int], width: int, group_size: int, groups: int) -> Tensor:
    """Returns node ids [rollout, decision] int64: rollouts of a group with equal ids share that decision."""
    leaf = torch.arange(group_size).repeat(groups)
    return torch.stack([leaf // shared for shared in sharing_leaves(branching, width)], 1)


def grow(
    segment: Segment, noise: Tensor, seeds: list[int], windows: list[list[int]], branching: Sequence[int], last: int
) -> Chain:
    """Grows a tree from each of `noise` [group, ...]: deterministic steps to the window, children at each of its steps,
    and deterministic steps from its end to grid point `last`. The leaves of a group are adjacent rows."""
    width, groups = len(windows[0]), range(len(seeds))
    children = [*branching, *[1] * (width - len(branching))]
    chain = segment(noise, [*groups], seeds, None, [0] * len(seeds), [window[0] for window in windows])
    steps: list[Tensor] = []
    for j, k in enumerate(children):
        alive = math.prod(children[: j + 1])
        owner = [g for g in groups for _ in range(alive)]
        child = [derive_seed(seeds[g], n) for g in groups for n in range(alive)]
        at = [windows[g][j] for g in owner]
        until = [windows[g][j + 1] if j + 1 < width else last for g in owner]
        chain = segment(repeat(chain.final, "b ... -> (b k) ...", k=k), owner, child, at, at, until)
        steps.append(torch.stack([chain.x, chain.x_next]))
    shared = sharing_leaves(branching, width)
    spread = [repeat(step, "two b ... -> two (b k) ...", k=k) for step, k in zip(steps, shared, strict=True)]
    x, x_next = torch.cat(spread, 2)
    return Chain(chain.final, x, x_next)

"""How a step's rollouts are cut into optimizer steps and micro-batches."""

from __future__ import annotations

import torch
from torch import Tensor


def partition(
    group: Tensor, *, minibatches: int, size: int, whole_groups: bool, generator: torch.Generator
) -> list[list[Tensor]]:
    """For each minibatch the rows [n] int64 of its micro-batches, of at most `size` rollouts.

    The order of groups is random, and rollouts of one `group` [rollout] stay together: a policy may read their prompt
    once for all. With `whole_groups` no cut goes through a group.

    Raises ValueError if a group is larger than `size` and must stay whole.
    """
    groups, member = group.unique(return_inverse=True)
    place = torch.randperm(len(groups), generator=generator)[member]
    order = place.argsort(stable=True)
    if not whole_groups:
        return [list(part.split(size)) for part in order.tensor_split(minibatches)]
    whole = [order[place[order] == g] for g in range(len(groups))]
    return [_filled(whole[first:last], size) for first, last in _cuts(len(whole), minibatches)]


def _cuts(count: int, parts: int) -> list[tuple[int, int]]:
    ends = [round(count * i / parts) for i in range(parts + 1)]
    return list(zip(ends[:-1], ends[1:], strict=True))


def _filled(groups: list[Tensor], size: int) -> list[Tensor]:
    """Groups joined to micro-batches of at most `size` rollouts."""
    found: list[list[Tensor]] = []
    for rows in groups:
        if len(rows) > size:
            raise ValueError(f"a group of {len(rows)} rollouts must stay whole and does not fit into {size}")
        if found and sum(map(len, found[-1])) + len(rows) <= size:
            found[-1].append(rows)
        else:
            found.append([rows])
    return [torch.cat(parts) for parts in found]

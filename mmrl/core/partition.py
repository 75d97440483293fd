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


def within_tokens(parts: list[Tensor], length: Tensor, *, tokens: int, rows: int) -> list[Tensor]:
    """A minibatch cut anew, in the order in which it is: micro-batches of at most `rows` rollouts and, filled up to
    their longest, of at most so many `tokens`. length: [rollout] int64. A rollout that is longer is alone."""
    found: list[list[int]] = []
    longest = 0
    for row in torch.cat(parts).tolist():
        longest = max(longest, int(length[row]))
        if found and len(found[-1]) < rows and (len(found[-1]) + 1) * longest <= tokens:
            found[-1].append(row)
        else:
            found.append([row])
            longest = int(length[row])
    return [torch.tensor(part) for part in found]


def halved(parts: list[Tensor], length: Tensor, count: int) -> list[Tensor]:
    """The micro-batches of a minibatch, as many as `count`: while there are fewer, the one of two or more rollouts that
    has most tokens, filled up to its longest, falls into halves. Raises ValueError where there are too few rollouts."""
    found = list(parts)
    while len(found) < count:
        cost = [len(part) * int(length[part].max()) if len(part) > 1 else 0 for part in found]
        if max(cost) == 0:
            raise ValueError(f"{sum(map(len, parts))} rollouts can not be cut into {count} micro-batches")
        place = cost.index(max(cost))
        found[place : place + 1] = found[place].tensor_split(2)
    return found

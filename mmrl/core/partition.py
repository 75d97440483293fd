"""Partition of a step's rollouts over ranks, optimizer steps and micro-batches."""

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
    position = torch.randperm(len(groups), generator=generator)[member]
    order = position.argsort(stable=True)
    if not whole_groups:
        return [list(part.split(size)) for part in order.tensor_split(minibatches)]
    whole = [order[position[order] == g] for g in range(len(groups))]
    return [_filled(whole[first:last], size) for first, last in _cuts(len(whole), minibatches)]


def _cuts(count: int, parts: int) -> list[tuple[int, int]]:
    ends = [round(count * i / parts) for i in range(parts + 1)]
    return list(zip(ends[:-1], ends[1:], strict=True))


def _filled(groups: list[Tensor], size: int) -> list[Tensor]:
    """Groups joined to micro-batches of at most `size` rollouts."""
    batches: list[list[Tensor]] = []
    for rows in groups:
        if len(rows) > size:
            raise ValueError(f"a group of {len(rows)} rollouts must stay whole and does not fit into {size}")
        if batches and sum(map(len, batches[-1])) + len(rows) <= size:
            batches[-1].append(rows)
        else:
            batches.append([rows])
    return [torch.cat(parts) for parts in batches]


def within_tokens(parts: list[Tensor], length: Tensor, *, tokens: int, rows: int) -> list[Tensor]:
    """A minibatch cut anew, in its order: micro-batches of at most `rows` rollouts and, filled up to
    their longest, of at most so many `tokens`. length: [rollout] int64. A rollout that is longer is alone."""
    batches: list[list[int]] = []
    longest = 0
    for row in torch.cat(parts).tolist():
        longest = max(longest, int(length[row]))
        if batches and len(batches[-1]) < rows and (len(batches[-1]) + 1) * longest <= tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
            longest = int(length[row])
    return [torch.tensor(part) for part in batches]


def halved(parts: list[Tensor], length: Tensor, count: int) -> list[Tensor]:
    """The micro-batches of a minibatch, as many as `count`: while there are fewer, the one of two or more rollouts that
    has most tokens, filled up to its longest, falls into halves. Raises ValueError where there are too few rollouts."""
    batches = list(parts)
    while len(batches) < count:
        cost = [len(part) * int(length[part].max()) if len(part) > 1 else 0 for part in batches]
        if max(cost) == 0:
            raise ValueError(f"{sum(map(len, parts))} rollouts can not be cut into {count} micro-batches")
        costliest = cost.index(max(cost))
        batches[costliest : costliest + 1] = batches[costliest].tensor_split(2)
    return batches


CLOSE = 1.01  # times the mean; what is gained below it is not worth a message


def exchanged(cost: Tensor, size: Tensor, rank: Tensor, fixed: Tensor) -> Tensor:
    """[slot] int64: the piece of work that goes to each slot, where piece i lies in slot i so far.

    Pieces of equal `size` [piece] swap slots between the rank with most to do and another one, as long as the larger
    load of the two falls. So every rank keeps as many pieces of each size. cost: [piece]; rank: [slot], whose it is;
    fixed: [rank], the cost of what can not move. All are int64, and equal input gives equal results on all ranks.
    """
    held = torch.arange(len(cost))
    loads = fixed.index_add(0, rank, cost)
    limit = CLOSE * float(loads.sum()) / len(loads)
    while (top := loads.max()) > limit:
        heaviest = int(loads.argmax())
        heavy, light = (rank == heaviest).nonzero().flatten(), (rank != heaviest).nonzero().flatten()
        relief = cost[held[heavy]][:, None] - cost[held[light]]
        larger = torch.maximum(top - relief, loads[rank[light]] + relief)
        larger = larger.where(size[held[heavy]][:, None] == size[held[light]], top).flatten()
        if len(larger) == 0 or larger.min() >= top:
            break
        best = int(larger.argmin())
        pair = torch.stack([heavy[best // len(light)], light[best % len(light)]])
        held[pair] = held[pair.flip(0)]
        loads = fixed.index_add(0, rank, cost[held])
    return held


def longest_first(parts: list[Tensor], group: Tensor, length: Tensor) -> list[Tensor]:
    """The micro-batches `parts` [row] of a minibatch with rollouts of similar `length` [rollout] together, which need
    less padding: groups by their longest rollout, and the longest rollout of each first. The number of micro-batches
    and their sizes stay. Nothing changes where groups differ in size, since some algorithms need them whole.
    """
    rows = torch.cat(parts)
    groups, member, counts = group[rows].unique(return_inverse=True, return_counts=True)
    if len(counts.unique()) > 1:
        return parts
    longest = torch.stack([length[rows][member == g].max() for g in range(len(groups))])
    keys = zip((-longest[member]).tolist(), member.tolist(), (-length[rows]).tolist(), rows.tolist(), strict=True)
    order = torch.tensor([row for *_, row in sorted(keys)])
    return list(order.split([len(part) for part in parts]))

"""Partition of a step's rollouts into minibatches (one optimizer step each) and micro-batches, and over ranks.

A micro-batch is a tensor [n] int64 of rollout indices (rows).
"""

from __future__ import annotations

import torch
from torch import Tensor


def partition(
    group: Tensor, *, minibatches: int, size: int, whole_groups: bool, generator: torch.Generator
) -> list[list[Tensor]]:
    """Splits rollouts into minibatches, each a list of micro-batches of at most `size` rollouts.

    group: [rollout] int64. Groups are shuffled, and rollouts of one group stay adjacent, so that a policy can encode
    their prompt once. With `whole_groups`, no group is split over two micro-batches.

    Raises ValueError if `whole_groups` is set and a group is larger than `size`.
    """
    groups, member = group.unique(return_inverse=True)
    position = torch.randperm(len(groups), generator=generator)[member]
    order = position.argsort(stable=True)
    if not whole_groups:
        return [list(rows.split(size)) for rows in order.tensor_split(minibatches)]
    group_rows = [order[position[order] == g] for g in range(len(groups))]
    return [_pack_groups(group_rows[begin:end], size) for begin, end in _even_ranges(len(group_rows), minibatches)]


def _even_ranges(total: int, num_ranges: int) -> list[tuple[int, int]]:
    """Splits range(total) into ranges (begin, end) whose sizes differ by at most 1."""
    bounds = [round(total * i / num_ranges) for i in range(num_ranges + 1)]
    return list(zip(bounds[:-1], bounds[1:], strict=True))


def _pack_groups(groups: list[Tensor], size: int) -> list[Tensor]:
    """Joins groups, each [n] rows, in order into micro-batches of at most `size` rollouts.

    Raises ValueError if a group is larger than `size`.
    """
    batches: list[list[Tensor]] = []
    for rows in groups:
        if len(rows) > size:
            raise ValueError(f"a group of {len(rows)} rollouts must stay whole, but a micro-batch takes only {size}")
        if batches and sum(map(len, batches[-1])) + len(rows) <= size:
            batches[-1].append(rows)
        else:
            batches.append([rows])
    return [torch.cat(batch) for batch in batches]


def split_by_tokens(micro_batches: list[Tensor], length: Tensor, *, max_tokens: int, max_rows: int) -> list[Tensor]:
    """Splits a minibatch again, in order, into micro-batches of at most `max_rows` rollouts and `max_tokens` tokens.

    length: [rollout] int64. Tokens include padding to the longest rollout. A rollout longer than `max_tokens` gets a
    micro-batch of its own.
    """
    batches: list[list[int]] = []
    longest = 0
    for row in torch.cat(micro_batches).tolist():
        longest = max(longest, int(length[row]))
        if batches and len(batches[-1]) < max_rows and (len(batches[-1]) + 1) * longest <= max_tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
            longest = int(length[row])
    return [torch.tensor(batch) for batch in batches]


def split_to_count(micro_batches: list[Tensor], length: Tensor, count: int) -> list[Tensor]:
    """Halves the micro-batch with the most tokens, padding included, until there are `count` micro-batches.

    length: [rollout] int64.

    Raises ValueError if there are fewer than `count` rollouts.
    """
    batches = list(micro_batches)
    while len(batches) < count:
        tokens = [len(rows) * int(length[rows].max()) if len(rows) > 1 else 0 for rows in batches]
        if max(tokens) == 0:
            num_rollouts = sum(map(len, micro_batches))
            raise ValueError(f"{num_rollouts} rollouts cannot be split into {count} micro-batches")
        largest = tokens.index(max(tokens))
        batches[largest : largest + 1] = batches[largest].tensor_split(2)
    return batches


BALANCED = 1.01  # largest load over the mean load: below it, moving work costs more than it saves


def assign_ranks(cost: Tensor, size: Tensor, rank: Tensor, fixed: Tensor) -> Tensor:
    """Assigns pieces of work to ranks so that their loads are similar. Returns the piece in each slot, [slot] int64.

    cost: [piece]; size: [piece], its number of rollouts; rank: [slot], the rank that a slot belongs to; fixed: [rank],
    the cost of work that stays. Piece i starts in slot i. As long as it lowers the larger of the two loads, a piece of
    the most loaded rank swaps slots with a piece of equal size of another rank. So each rank keeps its number of pieces
    of each size. All are int64; equal arguments give equal results on all ranks.
    """
    piece = torch.arange(len(cost))  # [slot]
    loads = fixed.index_add(0, rank, cost)
    limit = BALANCED * float(loads.sum()) / len(loads)
    while (max_load := loads.max()) > limit:
        busiest = int(loads.argmax())
        own_slots, other_slots = (rank == busiest).nonzero().flatten(), (rank != busiest).nonzero().flatten()
        # [own slot, other slot]: by how much a swap lowers the load of the busiest rank
        moved_cost = cost[piece[own_slots]][:, None] - cost[piece[other_slots]]
        larger_load = torch.maximum(max_load - moved_cost, loads[rank[other_slots]] + moved_cost)
        same_size = size[piece[own_slots]][:, None] == size[piece[other_slots]]
        larger_load = larger_load.where(same_size, max_load).flatten()
        if len(larger_load) == 0 or larger_load.min() >= max_load:
            break
        best = int(larger_load.argmin())  # index in the flattened table
        pair = torch.stack([own_slots[best // len(other_slots)], other_slots[best % len(other_slots)]])
        piece[pair] = piece[pair.flip(0)]
        loads = fixed.index_add(0, rank, cost[piece])
    return piece


def sort_by_length(micro_batches: list[Tensor], group: Tensor, length: Tensor) -> list[Tensor]:
    """Puts rollouts of similar length into the same micro-batch of a minibatch, which needs less padding.

    group, length: [rollout] int64. Groups are sorted by their longest rollout, and rollouts within a group by length,
    both longest first. The number and the sizes of the micro-batches stay. If groups differ in size, nothing changes,
    since some algorithms need whole groups in a micro-batch.
    """
    rows = torch.cat(micro_batches)
    groups, member, counts = group[rows].unique(return_inverse=True, return_counts=True)
    if len(counts.unique()) > 1:
        return micro_batches
    longest = torch.stack([length[rows][member == g].max() for g in range(len(groups))])
    keys = zip((-longest[member]).tolist(), member.tolist(), (-length[rows]).tolist(), rows.tolist(), strict=True)
    order = torch.tensor([row for *_, row in sorted(keys)])
    return list(order.split([len(batch) for batch in micro_batches]))

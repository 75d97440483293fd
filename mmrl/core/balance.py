"""How work is shared out, so that every rank has about as much to compute."""

from __future__ import annotations

import torch
from torch import Tensor

CLOSE = 1.01  # times the mean; what is gained below it is not worth a message


def exchanged(cost: Tensor, size: Tensor, rank: Tensor, fixed: Tensor) -> Tensor:
    """[place] int64: the piece of work that goes to each place, where piece i lies at place i so far.

    Pieces of equal `size` [piece] swap places between the rank with most to do and another one, as long as the larger
    load of the two falls. So every rank keeps as many pieces of each size. cost: [piece]; rank: [place], whose it is;
    fixed: [rank], the cost of what can not move. All are int64, and equal input gives equal results on all ranks.
    """
    held = torch.arange(len(cost))
    loads = fixed.index_add(0, rank, cost)
    most = CLOSE * float(loads.sum()) / len(loads)
    while (top := loads.max()) > most:
        heaviest = int(loads.argmax())
        here, there = (rank == heaviest).nonzero().flatten(), (rank != heaviest).nonzero().flatten()
        relief = cost[held[here]][:, None] - cost[held[there]]
        larger = torch.maximum(top - relief, loads[rank[there]] + relief)
        larger = larger.where(size[held[here]][:, None] == size[held[there]], top).flatten()
        if len(larger) == 0 or larger.min() >= top:
            break
        best = int(larger.argmin())
        pair = torch.stack([here[best // len(there)], there[best % len(there)]])
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
    most = torch.stack([length[rows][member == g].max() for g in range(len(groups))])
    keys = zip((-most[member]).tolist(), member.tolist(), (-length[rows]).tolist(), rows.tolist(), strict=True)
    order = torch.tensor([row for *_, row in sorted(keys)])
    return list(order.split([len(part) for part in parts]))

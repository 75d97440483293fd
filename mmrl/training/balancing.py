"""Exchange of groups of rollouts between ranks, so that the updates of all ranks cost about as much."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmrl.core.partition import balance_ranks
from mmrl.engine import Ranks
from mmrl.rollouts import Rollouts


@dataclass(frozen=True)
class Piece:
    """The rollouts of one group in one minibatch: their number and total cost. A piece that `stays` is not moved."""

    minibatch: int
    size: int
    cost: int
    stays: bool = False


@dataclass(frozen=True)
class Move:
    """Sends `Piece` `number` of rank `source` to rank `target`, into the rows that its piece `slot` had."""

    source: int
    number: int
    target: int
    slot: int


def balanced(
    rollouts: Rollouts, parts: list[list[Tensor]], cost: Tensor, staying: Tensor, ranks: Ranks
) -> tuple[Rollouts, dict[str, float]]:
    """Returns this rank's rollouts after the exchange, and the cost of the most loaded rank over the mean, before and
    after. A collective.

    A group takes the rows of one of the same size and minibatch, so a minibatch holds the same rollouts over all ranks,
    and every rank keeps its number of micro-batches. parts: the rows of the micro-batches of each minibatch; cost:
    [rollout] int64, of an update; staying: [rollout] bool, True where a rollout is not moved.
    """
    local, rows = pieces(rollouts.group, parts, cost, staying)
    by_rank = ranks.gather(local)
    moves = planned(by_rank)
    before = [[(piece.minibatch, piece.cost) for piece in listed] for listed in by_rank]
    after = [list(listed) for listed in before]
    for move in moves:
        after[move.target][move.slot] = before[move.source][move.number]
    reports = {"balance/heaviest_rank_before": heaviest(before), "balance/heaviest_rank": heaviest(after)}
    return (sent(rollouts, rows, moves, ranks) if moves else rollouts), reports


def pieces(group: Tensor, parts: list[list[Tensor]], cost: Tensor, staying: Tensor) -> tuple[list[Piece], list[Tensor]]:
    """Returns the pieces of one rank, and the rows [n] of each. A group that lies in two minibatches stays: otherwise
    its parts could go to two ranks."""
    listed, rows = [], []
    for minibatch, part in enumerate(parts):
        every = torch.cat(part)
        for one in dict.fromkeys(group[every].tolist()):
            members = every[group[every] == one]
            stays = len(members) < int((group == one).sum()) or bool(staying[members].any())
            listed.append(Piece(minibatch, len(members), int(cost[members].sum()), stays))
            rows.append(members)
    return listed, rows


def planned(by_rank: Sequence[Sequence[Piece]]) -> list[Move]:
    """Plans the moves between ranks, sorted by source and target. by_rank: the pieces of each rank."""
    every = [(rank, number, piece) for rank, listed in enumerate(by_rank) for number, piece in enumerate(listed)]
    moves = []
    for minibatch in sorted({piece.minibatch for _, _, piece in every}):
        fixed, free = torch.zeros(len(by_rank), dtype=torch.int64), []
        for rank, number, piece in every:
            if piece.minibatch == minibatch and piece.stays:
                fixed[rank] += piece.cost
            elif piece.minibatch == minibatch:
                free.append((rank, number, piece.cost, piece.size))
        table = torch.tensor(free, dtype=torch.int64).view(-1, 4)
        held = balance_ranks(cost=table[:, 2], size=table[:, 3], rank=table[:, 0], fixed=fixed)
        for slot, piece in enumerate(held.tolist()):
            if piece != slot:
                moves.append(Move(*table[piece, :2].tolist(), *table[slot, :2].tolist()))
    return sorted(moves, key=lambda move: (move.source, move.target))


def heaviest(loads: Sequence[Sequence[tuple[int, int]]]) -> float:
    """Returns the largest cost of a rank over the mean, with a barrier after every minibatch. loads: of each rank, the
    minibatch and cost of its pieces."""
    largest, total = 0, 0
    for minibatch in {minibatch for listed in loads for minibatch, _ in listed}:
        costs = [sum(cost for m, cost in listed if m == minibatch) for listed in loads]
        largest, total = largest + max(costs), total + sum(costs)
    return largest * len(loads) / max(1, total)


def sent(rollouts: Rollouts, rows: Sequence[Tensor], moves: Sequence[Move], ranks: Ranks) -> Rollouts:
    """Exchanges rollouts and returns those of this rank afterwards. rows: of each of its pieces. A collective."""
    parcels: list[Rollouts | None] = []
    for target in range(ranks.world):
        leaving = [rows[move.number] for move in moves if (move.source, move.target) == (ranks.rank, target)]
        parcels.append(rollouts.select(torch.cat(leaving)) if leaving else None)
    arrived = [parcel for parcel in ranks.exchange(parcels, instead="engine.balance=none") if parcel is not None]
    replaced = [rows[move.slot] for move in moves if move.target == ranks.rank]
    if not replaced:
        return rollouts
    index, new = torch.arange(len(rollouts)), torch.cat(replaced)
    index[new] = len(rollouts) + torch.arange(len(new))
    return Rollouts.concat([rollouts, *arrived]).select(index)

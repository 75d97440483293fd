"""Ranks exchange groups of rollouts, so that none of them waits long for others to learn from theirs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmrl.core.partition import exchanged
from mmrl.engine import Ranks
from mmrl.rollouts import Rollouts


@dataclass(frozen=True)
class Piece:
    """Rollouts of one group in one minibatch: their number, and their cost together. One that `stays` does not leave
    its rank."""

    minibatch: int
    size: int
    cost: int
    stays: bool = False


@dataclass(frozen=True)
class Move:
    """A piece goes to the rank `target`, and takes the rows of piece number `place` there. number: its own."""

    source: int
    number: int
    target: int
    place: int


def balanced(
    rollouts: Rollouts, parts: list[list[Tensor]], cost: Tensor, staying: Tensor, ranks: Ranks
) -> tuple[Rollouts, dict[str, float]]:
    """This rank's rollouts with groups of other ranks in the rows of some of its own, and what the rank with most has
    to do, before and after, in units of the mean. A collective.

    A group takes the rows of one of the same size and minibatch, so over all ranks a minibatch holds what it held, and
    every rank keeps its number of micro-batches. parts: the rows of the micro-batches of each minibatch; cost:
    [rollout] int64, of learning from one; staying: [rollout] bool.
    """
    own, rows = pieces(rollouts.group, parts, cost, staying)
    told = ranks.gather(own)
    moves = planned(told)
    before = [[(piece.minibatch, piece.cost) for piece in listed] for listed in told]
    after = [list(listed) for listed in before]
    for move in moves:
        after[move.target][move.place] = before[move.source][move.number]
    reports = {"balance/heaviest_rank_before": heaviest(before), "balance/heaviest_rank": heaviest(after)}
    return (sent(rollouts, rows, moves, ranks) if moves else rollouts), reports


def pieces(group: Tensor, parts: list[list[Tensor]], cost: Tensor, staying: Tensor) -> tuple[list[Piece], list[Tensor]]:
    """Those of one rank, and the rows [n] of each. A group that lies in two minibatches stays: otherwise its parts
    could go to two ranks."""
    found, rows = [], []
    for minibatch, part in enumerate(parts):
        every = torch.cat(part)
        for one in dict.fromkeys(group[every].tolist()):
            own = every[group[every] == one]
            stays = len(own) < int((group == one).sum()) or bool(staying[own].any())
            found.append(Piece(minibatch, len(own), int(cost[own].sum()), stays))
            rows.append(own)
    return found, rows


def planned(told: Sequence[Sequence[Piece]]) -> list[Move]:
    """How pieces move between ranks, sorted by source and target; `told` has those of each rank."""
    every = [(rank, number, piece) for rank, listed in enumerate(told) for number, piece in enumerate(listed)]
    moves = []
    for minibatch in sorted({piece.minibatch for _, _, piece in every}):
        fixed, free = torch.zeros(len(told), dtype=torch.int64), []
        for rank, number, piece in every:
            if piece.minibatch == minibatch and piece.stays:
                fixed[rank] += piece.cost
            elif piece.minibatch == minibatch:
                free.append((rank, number, piece.cost, piece.size))
        place = torch.tensor(free, dtype=torch.int64).view(-1, 4)
        held = exchanged(cost=place[:, 2], size=place[:, 3], rank=place[:, 0], fixed=fixed)
        for at, piece in enumerate(held.tolist()):
            if piece != at:
                moves.append(Move(*place[piece, :2].tolist(), *place[at, :2].tolist()))
    return sorted(moves, key=lambda move: (move.source, move.target))


def heaviest(loads: Sequence[Sequence[tuple[int, int]]]) -> float:
    """The largest cost of a rank over the mean of all, where ranks wait for each other after every minibatch. loads: by
    rank, minibatch and cost of its pieces."""
    largest, total = 0, 0
    for minibatch in {minibatch for listed in loads for minibatch, _ in listed}:
        costs = [sum(cost for m, cost in listed if m == minibatch) for listed in loads]
        largest, total = largest + max(costs), total + sum(costs)
    return largest * len(loads) / max(1, total)


def sent(rollouts: Rollouts, rows: Sequence[Tensor], moves: Sequence[Move], ranks: Ranks) -> Rollouts:
    """The rollouts of this rank after all ranks have made the moves. rows: of each of its pieces."""
    parcels: list[Rollouts | None] = []
    for target in range(ranks.world):
        leaving = [rows[move.number] for move in moves if (move.source, move.target) == (ranks.rank, target)]
        parcels.append(rollouts.select(torch.cat(leaving)) if leaving else None)
    arrived = [parcel for parcel in ranks.exchange(parcels, instead="engine.balance=none") if parcel is not None]
    places = [rows[move.place] for move in moves if move.target == ranks.rank]
    if not places:
        return rollouts
    index, new = torch.arange(len(rollouts)), torch.cat(places)
    index[new] = len(rollouts) + torch.arange(len(new))
    return Rollouts.concat([rollouts, *arrived]).select(index)

"""Load balancing: ranks exchange groups of rollouts, so that an update costs about the same on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmrl.core.partition import assign_ranks
from mmrl.engine import Ranks
from mmrl.rollouts import Rollouts


@dataclass(frozen=True)
class Piece:
    """The rollouts of one group in one minibatch. size: their number. cost: their total cost. stays: whether they must
    stay on their rank."""

    minibatch: int
    size: int
    cost: int
    stays: bool = False


@dataclass(frozen=True)
class Move:
    """A move of piece `number` of rank `source` to rank `target`, where it replaces piece `slot`."""

    source: int
    number: int
    target: int
    slot: int


def balance_ranks(
    rollouts: Rollouts, parts: list[list[Tensor]], cost: Tensor, staying: Tensor, ranks: Ranks
) -> tuple[Rollouts, dict[str, float]]:
    """Exchanges groups between ranks. Returns this rank's rollouts, and metrics: the cost of the most loaded rank over
    the mean, before and after the exchange. A collective.

    A group is swapped only with one of the same size and minibatch. So a minibatch holds the same rollouts over all
    ranks as before, and every rank keeps its number of micro-batches. parts: the rows [n] of each micro-batch of each
    minibatch. cost: [rollout] int64, what an update on it costs. staying: [rollout] bool, True where a rollout must
    stay on its rank.
    """
    local, rows = split_pieces(rollouts.group, parts, cost, staying)
    by_rank = ranks.gather(local)
    moves = plan_moves(by_rank)
    before = [[(piece.minibatch, piece.cost) for piece in pieces] for pieces in by_rank]
    after = [list(loads) for loads in before]
    for move in moves:
        after[move.target][move.slot] = before[move.source][move.number]
    reports = {"balance/heaviest_rank_before": imbalance(before), "balance/heaviest_rank": imbalance(after)}
    return (exchange_rollouts(rollouts, rows, moves, ranks) if moves else rollouts), reports


def split_pieces(
    group: Tensor, parts: list[list[Tensor]], cost: Tensor, staying: Tensor
) -> tuple[list[Piece], list[Tensor]]:
    """Returns the pieces of one rank, and the rows [n] of each. A group that lies in two minibatches stays, since its
    two pieces could otherwise go to different ranks. Arguments as in `balance_ranks`; group: [rollout] int64."""
    pieces, rows = [], []
    for minibatch, part in enumerate(parts):
        minibatch_rows = torch.cat(part)
        for group_id in dict.fromkeys(group[minibatch_rows].tolist()):
            members = minibatch_rows[group[minibatch_rows] == group_id]
            stays = len(members) < int((group == group_id).sum()) or bool(staying[members].any())
            pieces.append(Piece(minibatch, len(members), int(cost[members].sum()), stays))
            rows.append(members)
    return pieces, rows


def plan_moves(by_rank: Sequence[Sequence[Piece]]) -> list[Move]:
    """Plans the moves that balance the cost of each minibatch over ranks. by_rank: the pieces of each rank. Returns the
    moves sorted by source and target."""
    all_pieces = [(rank, number, piece) for rank, pieces in enumerate(by_rank) for number, piece in enumerate(pieces)]
    moves = []
    for minibatch in sorted({piece.minibatch for _, _, piece in all_pieces}):
        fixed, free = torch.zeros(len(by_rank), dtype=torch.int64), []
        for rank, number, piece in all_pieces:
            if piece.minibatch == minibatch and piece.stays:
                fixed[rank] += piece.cost
            elif piece.minibatch == minibatch:
                free.append((rank, number, piece.cost, piece.size))
        # a row for each piece that may move: rank, number, cost, size; slots are numbered like these rows
        table = torch.tensor(free, dtype=torch.int64).view(-1, 4)
        piece_of_slot = assign_ranks(cost=table[:, 2], size=table[:, 3], rank=table[:, 0], fixed=fixed)
        for slot, piece in enumerate(piece_of_slot.tolist()):
            if piece != slot:  # from (rank, number) of the piece to (rank, number) of the slot
                moves.append(Move(*table[piece, :2].tolist(), *table[slot, :2].tolist()))
    return sorted(moves, key=lambda move: (move.source, move.target))


def imbalance(loads: Sequence[Sequence[tuple[int, int]]]) -> float:
    """Returns the largest cost of any rank divided by the mean over ranks. Both are summed over minibatches, since
    ranks wait for one another after each minibatch. loads: for each rank, (minibatch, cost) of its pieces."""
    largest, total = 0, 0
    for minibatch in {minibatch for pieces in loads for minibatch, _ in pieces}:
        costs = [sum(cost for m, cost in pieces if m == minibatch) for pieces in loads]
        largest, total = largest + max(costs), total + sum(costs)
    return largest * len(loads) / max(1, total)


def exchange_rollouts(rollouts: Rollouts, rows: Sequence[Tensor], moves: Sequence[Move], ranks: Ranks) -> Rollouts:
    """Carries out moves and returns this rank's rollouts afterwards. rows: the rows [n] of each piece of this rank. A
    collective."""
    outgoing: list[Rollouts | None] = []
    for target in range(ranks.world):
        leaving = [rows[move.number] for move in moves if (move.source, move.target) == (ranks.rank, target)]
        outgoing.append(rollouts.select(torch.cat(leaving)) if leaving else None)
    incoming = [part for part in ranks.exchange(outgoing, instead="engine.balance=none") if part is not None]
    replaced = [rows[move.slot] for move in moves if move.target == ranks.rank]
    if not replaced:
        return rollouts
    # incoming rollouts are appended, and then selected in place of those that have left
    index, replaced_rows = torch.arange(len(rollouts)), torch.cat(replaced)
    index[replaced_rows] = len(rollouts) + torch.arange(len(replaced_rows))
    return Rollouts.concat([rollouts, *incoming]).select(index)

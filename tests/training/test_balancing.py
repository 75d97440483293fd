"""Which groups change ranks, worked out by hand."""

import threading
from types import SimpleNamespace

import pytest
import torch

from mmrl.rollouts import Prompt, Rollouts, Sample
from mmrl.training.balancing import Move, Piece, balance_ranks, imbalance, plan_moves, split_pieces
from tests.helpers.threads import together

GROUP = torch.tensor([4, 4, 6, 6, 5, 5])
COST = torch.tensor([1, 2, 10, 20, 100, 200])
NOWHERE = torch.zeros(6, dtype=torch.bool)


def test_pieces_are_the_groups_of_each_minibatch():
    parts = [[torch.tensor([3, 2]), torch.tensor([0, 1])], [torch.tensor([4, 5])]]
    found, rows = split_pieces(GROUP, parts, COST, NOWHERE)
    assert found == [Piece(0, 2, 30), Piece(0, 2, 3), Piece(1, 2, 300)]
    assert [own.tolist() for own in rows] == [[3, 2], [0, 1], [4, 5]]


def test_a_group_in_two_minibatches_stays_and_so_does_what_is_shown():
    parts = [[torch.tensor([2, 3, 4])], [torch.tensor([5, 0, 1])]]
    shown = torch.tensor([True, True, False, False, False, False])
    found, _ = split_pieces(GROUP, parts, COST, shown)
    assert found == [Piece(0, 2, 30), Piece(0, 1, 100, True), Piece(1, 1, 200, True), Piece(1, 2, 3, True)]


def test_moves_stay_in_their_minibatch():
    # Minibatch 0: 19 against 5, and 10 for 3 makes 12 each. Minibatch 1: 8 against 2 in one piece each.
    told = [
        [Piece(0, 2, 10), Piece(1, 2, 8), Piece(0, 2, 9)],
        [Piece(1, 2, 2), Piece(0, 2, 3), Piece(0, 2, 2)],
    ]
    assert plan_moves(told) == [Move(0, 0, 1, 1), Move(1, 1, 0, 0)]


def test_what_stays_is_counted_where_it_is():
    # 19 + 3 against 5: 10 for 2 makes 14 and 13.
    told = [
        [Piece(0, 2, 10), Piece(0, 2, 9), Piece(0, 2, 3, stays=True)],
        [Piece(0, 2, 3), Piece(0, 2, 2)],
    ]
    assert plan_moves(told) == [Move(0, 0, 1, 1), Move(1, 1, 0, 0)]


def test_all_that_stays_is_counted():
    # 19 + 5 + 0 against 5: 10 for 2 makes 16 and 13; without the 5, 10 for 3 would make 12 each.
    staying = [Piece(0, 2, 5, stays=True), Piece(0, 2, 0, stays=True)]
    told = [[Piece(0, 2, 10), Piece(0, 2, 9), *staying], [Piece(0, 2, 3), Piece(0, 2, 2)]]
    assert plan_moves(told) == [Move(0, 0, 1, 1), Move(1, 1, 0, 0)]


def test_moves_in_a_ring():
    # 30, 12 and 0 of three ranks with two pieces each, mean 14.
    told = [[Piece(0, 1, 16), Piece(0, 1, 14)], [Piece(0, 1, 6), Piece(0, 1, 6)], [Piece(0, 1, 0), Piece(0, 1, 0)]]
    moves = plan_moves(told)
    held = [[piece.cost for piece in listed] for listed in told]
    for move in moves:
        held[move.target][move.slot] = told[move.source][move.number].cost
    assert sorted(map(sum, held)) == [12, 14, 16]
    assert sorted((m.source, m.number) for m in moves) == sorted((m.target, m.slot) for m in moves)


def test_what_comes_from_two_ranks_takes_the_places_that_it_was_given():
    # 17, 2 and 17 of three ranks become 12, 10 and 14: the first gets the 2 in its first place and a 10 in its second.
    costs, barrier, seen = [[10, 7], [2, 0], [10, 7]], threading.Barrier(3, timeout=30), [None] * 3
    moves = plan_moves([[Piece(0, 1, cost) for cost in own] for own in costs])
    assert [move for move in moves if move.target == 0] == [Move(1, 0, 0, 0), Move(2, 0, 0, 1)]

    def work(rank):
        def gather(value):
            seen[rank] = value
            barrier.wait()
            found = list(seen)
            barrier.wait()
            return found

        def exchange(parcels, instead):
            return [told[rank] for told in gather(parcels)]

        own = Rollouts(
            [Sample(Prompt("p", "p"))] * 2,
            [f"{rank}-{number}" for number in range(2)],
            torch.tensor([2 * rank, 2 * rank + 1]),
            torch.ones(2, 1, dtype=torch.bool),
            torch.zeros(2, 1),
        )
        ranks = SimpleNamespace(rank=rank, world=3, gather=gather, exchange=exchange)
        nowhere = torch.zeros(2, dtype=torch.bool)
        return balance_ranks(own, [[torch.tensor([0, 1])]], torch.tensor(costs[rank]), nowhere, ranks)[0].inputs

    assert together(work, range(3), barrier) == [["1-0", "2-0"], ["0-0", "1-1"], ["0-1", "2-1"]]


def test_the_heaviest_rank_is_waited_for_in_every_minibatch():
    # Of 6 and 2, then of 1 and 3: ranks wait for 6 + 3, where 6 each would do.
    assert imbalance([[(0, 4), (1, 1), (0, 2)], [(1, 3), (0, 2)]]) == pytest.approx(9 / 6)
    assert imbalance([[(0, 0)], [(0, 0)]]) == 0.0

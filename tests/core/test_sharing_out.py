"""Pieces of work that change places, by hand and against all ways to share them out."""

from itertools import combinations

import pytest
import torch

from mmrl.core.partition import assign_ranks, sort_by_length


def loads(cost, rank, held, fixed=None):
    found = torch.zeros(int(max(rank)) + 1, dtype=torch.int64) if fixed is None else torch.tensor(fixed)
    return found.index_add(0, torch.tensor(rank), torch.tensor(cost)[held]).tolist()


def plan(cost, rank, size=None, fixed=None):
    fixed = fixed or [0] * (max(rank) + 1)
    size = [1] * len(cost) if size is None else size
    return assign_ranks(*(torch.tensor(column, dtype=torch.int64) for column in (cost, size, rank, fixed))).tolist()


def test_the_larger_load_falls_as_far_as_one_swap_can_bring_it():
    # 19 and 5: the mean is 12. 10 for 3 leaves 12 and 12.
    assert plan([10, 9, 3, 2], [0, 0, 1, 1]) == [2, 1, 0, 3]


def test_pieces_of_another_size_stay_where_they_are():
    # The best swap, 10 for 3, is of two rollouts against one; 9 for 2 leaves 12 and 12 too.
    assert plan([10, 9, 3, 2], [0, 0, 1, 1], size=[2, 1, 1, 1]) == [0, 3, 2, 1]
    assert plan([10, 9, 3, 2], [0, 0, 1, 1], size=[2, 2, 1, 1]) == [0, 1, 2, 3]


def test_what_can_not_move_counts():
    # 19 + 0 against 5 + 14: nothing is to be gained.
    assert plan([10, 9, 3, 2], [0, 0, 1, 1], fixed=[0, 14]) == [0, 1, 2, 3]
    # 19 + 3 against 5 + 0: 10 for 2 leaves 14 and 13.
    assert plan([10, 9, 3, 2], [0, 0, 1, 1], fixed=[3, 0]) == [3, 1, 2, 0]


def test_one_percent_is_not_worth_a_message():
    assert plan([1010, 990], [0, 1]) == [0, 1]
    assert plan([505, 505, 495, 495], [0, 0, 1, 1]) == [0, 1, 2, 3]
    assert plan([506, 506, 494, 494], [0, 0, 1, 1]) == [2, 1, 0, 3]


def test_nothing_to_move():
    assert plan([], [], fixed=[5, 1]) == []
    assert plan([5, 1], [0, 0], fixed=[0, 0]) == [0, 1]


def best(cost, ranks, each):
    """The smallest largest load of all ways to give every rank so many pieces."""
    if ranks == 0:
        return 0
    first, *rest = range(len(cost))
    found = []
    for others in combinations(rest, each - 1):
        left = [cost[i] for i in rest if i not in others]
        found.append(max(cost[first] + sum(cost[i] for i in others), best(left, ranks - 1, each)))
    return min(found)


@pytest.mark.parametrize(("ranks", "each"), [(2, 4), (4, 2), (3, 3)])
def test_the_largest_load_is_about_the_smallest_that_there_is(ranks, each):
    draw = torch.Generator().manual_seed(0)
    before, after, least = 0.0, 0.0, 0.0
    for _ in range(20):
        cost = (torch.randn(ranks * each, generator=draw) * 0.8 + 6).exp().long().tolist()
        rank = [r for r in range(ranks) for _ in range(each)]
        held, smallest = plan(cost, rank), best(cost, ranks, each)
        assert sorted(held) == list(range(len(cost)))
        largest = max(loads(cost, rank, held))
        assert smallest <= largest <= max(1.05 * smallest, 1.01 * sum(cost) / ranks)
        before, after, least = before + max(loads(cost, rank, range(len(cost)))), after + largest, least + smallest
    assert after < 1.01 * least < 0.9 * before


def test_longest_first_by_hand():
    group = torch.tensor([7, 7, 8, 8, 9, 9])
    length = torch.tensor([1, 4, 9, 2, 5, 5])
    parts = [torch.tensor([5, 0, 1, 4]), torch.tensor([3, 2])]
    # Of the groups the longest have 4, 9 and 5.
    assert [part.tolist() for part in sort_by_length(parts, group, length)] == [[2, 3, 4, 5], [1, 0]]


def test_groups_of_unequal_size_keep_their_order():
    parts = [torch.tensor([0, 1]), torch.tensor([2])]
    assert sort_by_length(parts, torch.tensor([7, 7, 8]), torch.tensor([1, 4, 9])) == parts

"""Which groups are worth a gradient: by the combined reward, and by the bounds of accuracy."""

import math

import pytest
import torch

from mmrl.core.filters import groups_in_range, varied_components, varied_groups, whole_groups

NAN = math.nan

# 8: 0 1 | 5: all 0.1 | -1: one scored | 6: equal once NaN is ignored | 3: 0 0 1 with a NaN | 2: 0.8 1
REWARDS = torch.tensor([0, 1, 0.1, 0.1, 0.1, 3, NAN, 2, NAN, 2, 0, NAN, 0, 1, 0.8, 1])
GROUP = torch.tensor([8, 8, 5, 5, 5, -1, -1, 6, 6, 6, 3, 3, 3, 3, 2, 2])


def groups(kept, group=GROUP):
    """The groups that are kept; a group is kept whole or not at all."""
    found = set(group[kept].tolist())
    assert not found & set(group[~kept].tolist())
    return found


def test_groups_whose_scored_rewards_differ_are_varied():
    keep = varied_groups(REWARDS, GROUP)
    assert keep.dtype == torch.bool and groups(keep) == {8, 3, 2}
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    assert torch.equal(varied_groups(REWARDS[order], GROUP[order]), keep[order])


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        ((None, None), {8, 5, -1, 6, 3, 2}),
        ((0.4, None), {8, -1, 6, 2}),  # means 1/2, 0.1, 3, 2, 1/3, 0.9
        ((None, 0.8), {8, 5, 3}),
        ((0.5, 0.5), {8}),  # the bounds belong to the range
    ],
)
def test_groups_within_the_bounds_of_their_mean(bounds, expected):
    keep = groups_in_range(REWARDS, GROUP, low=bounds[0], high=bounds[1])
    assert groups(keep) == expected
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    shuffled = groups_in_range(REWARDS[order], GROUP[order], low=bounds[0], high=bounds[1])
    assert torch.equal(shuffled, keep[order])


@pytest.mark.parametrize(("low", "high", "inside"), [(None, None, True), (0.0, None, False), (None, 1.0, False)])
def test_a_group_without_a_score_is_outside_of_any_bound(low, high, inside):
    kept = groups_in_range(torch.tensor([NAN, NAN]), torch.tensor([3, 3]), low=low, high=high)
    assert kept.tolist() == [inside] * 2


def test_values_and_groups_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="must both be"):
        varied_groups(REWARDS, GROUP[:3])
    with pytest.raises(ValueError, match="must both be"):
        groups_in_range(REWARDS, GROUP[:3], low=None, high=None)


# Groups of two. 0: the first varies | 1: both vary and cancel | 2: the second varies | 3: one of them is unscored
TABLE = torch.tensor([[0, 1], [1, 1], [0, 1], [1, 0], [1, 0], [1, 1], [0, NAN], [1, 0]])
PAIRS = torch.arange(4).repeat_interleave(2)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ([1.0, 1.0], {0, 1, 2}),  # what cancels in the sum still varies
        ([1.0, 0.0], {0, 1, 3}),  # a component of weight 0 is not looked at
        ([0.0, 1.0], {1, 2}),
        ([0.0, 0.0], set()),
    ],
)
def test_groups_in_which_a_component_varies(weights, expected):
    assert groups(varied_components(TABLE, PAIRS, torch.tensor(weights)), PAIRS) == expected


@pytest.mark.parametrize(("least", "shown"), [(1, [0, 1, 5]), (3, [0, 1, 5]), (4, [0, 1, 5, 2, 3, 4]), (99, None)])
def test_the_first_groups_are_taken_whole(least, shown):
    group = torch.tensor([5, 5, -2, -2, -2, 5, 9])
    assert whole_groups(group, least).tolist() == (shown or [0, 1, 5, 2, 3, 4, 6])

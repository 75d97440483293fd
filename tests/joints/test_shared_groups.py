"""Ranks that have groups to spare give them to others: dynamic sampling from its key to each rank's batch."""

import pytest

from mmrl.collection.dynamic_sampling import Candidate, assign_groups
from tests.helpers.threads import together
from tests.joints.parts import Table
from tests.joints.test_balance import Exchanging
from tests.joints.test_ranks import Exchange

# Which of the first twelve prompts that are drawn, four a round, teach something.
TEACHES = [1, 1, 0, 1, 1, 0, 0, 0, 0, 1, 1, 1]


def table(positions):
    """Groups of two at these places of the draw; the first rollout's reward tells the place."""
    rewards = [float(p + 1) if first else (0.0 if TEACHES[p] else float(p + 1)) for p in positions for first in (1, 0)]
    return Table([[-1.0]] * len(rewards), group=[p for p in positions for _ in range(2)], rewards=rewards)


def found(rollouts):
    """Of each group its place, what its rewards say of that, and whether it only fills one."""
    pairs = zip(
        rollouts.group[::2].tolist(), rollouts.rewards[::2, 0].tolist(), rollouts.filler[::2].tolist(), strict=True
    )
    return [(place, int(reward) - 1, filler) for place, reward, filler in pairs]


def sampled(given, *overrides):
    """What each of two ranks has, and how many prompts it asked for."""
    meeting, jobs = Exchange(), []
    for own in ([0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]):
        made = given(table(own), "rollout.prompts=4", *overrides, world=2, rank=len(jobs))
        engine = made.trainer.engine
        engine.__class__, engine.meeting, engine.sent = Exchanging, meeting, []
        jobs.append(made)
    batches = together(lambda made: made.next(), jobs, meeting.barrier)
    return [found(batch) for batch in batches], [made.trainer.policy.asked for made in jobs]


def alone(given, *overrides):
    return found(given(table(range(12)), "rollout.prompts=4", *overrides).next())


def test_two_ranks_have_the_groups_of_one(given):
    expected = [(p, p, False) for p in (0, 1, 3, 4)]
    assert alone(given, "rollout.dynamic_sampling={}") == expected
    (one, two), asked = sampled(given, "rollout.dynamic_sampling={}")
    assert one == expected[:2] and two == expected[2:]  # the group at place 4 changed ranks
    assert asked == [4, 4]  # two rounds


def test_without_sharing_each_rank_goes_on_until_it_has_its_own(given):
    (one, two), asked = sampled(given, "rollout.dynamic_sampling={shared: false}")
    assert one == [(0, 0, False), (1, 1, False)] and two == [(3, 3, False), (10, 10, False)]
    assert asked == [6, 6]  # three rounds, for both wait for each other


def test_places_that_stay_empty_are_filled_as_one_rank_fills_them(given):
    once = "rollout.dynamic_sampling={max_rounds: 1}"
    (one, two), _ = sampled(given, once)
    assert one == [(0, 0, False), (1, 1, False)] and two == [(3, 3, False), (2, 2, True)]
    assert alone(given, once) == [*one, *two]


def candidates(*given):
    """teaches, turn and position of each."""
    return [Candidate(bool(teaches), turn, position) for teaches, turn, position in given]


def places(told, wanted):
    return [[(source, candidate.position) for source, candidate in own] for own in assign_groups(told, wanted)]


def test_earlier_rounds_and_draws_come_first():
    told = [candidates((1, 0, 7), (1, 0, 2), (0, 0, 1), (1, 1, 0)), candidates((0, 0, 5), (0, 0, 4))]
    # Taken are 2 and 7 of the first round, 0 of the second, and 1, the first that teaches nothing.
    assert places(told, 2) == [[(0, 2), (0, 7)], [(0, 0), (0, 1)]]


def test_a_rank_keeps_what_it_has_room_for():
    told = [candidates((1, 0, 0)), candidates((1, 0, 1), (1, 0, 2), (1, 0, 3)), candidates((0, 0, 4), (1, 0, 5))]
    assert places(told, 1) == [[(0, 0)], [(1, 1)], [(1, 2)]]
    assert places(told, 2) == [[(0, 0), (1, 3)], [(1, 1), (1, 2)], [(2, 5), (2, 4)]]


@pytest.mark.parametrize("wanted", [1, 2, 3])
def test_each_group_goes_to_one_rank(wanted):
    told = [candidates(*((p % 3 > 0, p // 6, p) for p in range(start, 18, 3))) for start in range(3)]
    dealt_out = places(told, wanted)
    assert [len(own) for own in dealt_out] == [wanted] * 3
    every = [position for own in dealt_out for _, position in own]
    assert len(set(every)) == 3 * wanted
    assert sorted(every) == sorted(sorted(range(18), key=lambda p: (p % 3 == 0, p // 6, p))[: 3 * wanted])


def test_what_one_rank_has_to_spare_is_shared_out():
    told = [candidates((1, 0, 0), (1, 0, 1), (1, 0, 2)), candidates((0, 0, 3)), candidates((0, 0, 4))]
    assert places(told, 1) == [[(0, 0)], [(0, 1)], [(0, 2)]]

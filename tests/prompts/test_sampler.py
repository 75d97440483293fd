"""The order of prompts and the seeds of rollouts follow from positions: resuming and sharding change nothing."""

import pytest

from mmrl.prompts.sampler import Outcome, Permutation
from mmrl.runtime.seeds import rollout_seeds


def started(size, seed):
    sampler = Permutation()
    sampler.start(size, seed)
    return sampler


def epochs(sampler, size, count):
    return [sampler.draw(size) for _ in range(count)]


@pytest.mark.parametrize("size", [1, 2, 7, 50])
def test_each_epoch_shows_every_item_once(size):
    for shown in epochs(started(size, seed=3), size, 4):
        assert sorted(shown) == list(range(size))


def test_epochs_and_seeds_differ():
    first, second, third = epochs(started(50, seed=0), 50, 3)
    assert first != second and second != third and first != third and first != list(range(50))
    assert epochs(started(50, seed=1), 50, 1)[0] != first
    # Seed 1 is not seed 0 one epoch later: neighbouring seeds share no order.
    assert epochs(started(50, seed=1), 50, 1)[0] != second


def test_the_number_drawn_is_the_whole_state():
    size = 5
    straight = started(size, seed=7).draw(4 * size)
    assert all(type(index) is int for index in straight)
    for parts in ([1] * 20, [3, 4, 3, 9, 1], [5, 5, 10]):  # however the draws are cut, also across epochs
        sampler = started(size, seed=7)
        assert [index for count in parts for index in sampler.draw(count)] == straight
        assert sampler.state() == {"drawn": 20}
    for drawn in range(4 * size):  # also at the edge of an epoch, and backwards
        sampler.load({"drawn": drawn})
        assert sampler.draw(4 * size - drawn) == straight[drawn:]


def test_a_state_does_not_follow_later_draws():
    sampler = started(5, seed=7)
    sampler.draw(3)
    state = sampler.state()
    then = sampler.draw(4)
    sampler.load(state)
    assert sampler.draw(4) == then


def test_outcomes_change_no_permutation():
    one, other = started(5, seed=7), started(5, seed=7)
    assert one.draw(3) == other.draw(3)
    one.observe([Outcome(2, (1.0, 0.0), (1.0, 0.0))])
    assert one.state() == other.state() and one.draw(9) == other.draw(9)


def test_a_sampler_that_is_started_again_begins_again():
    sampler = started(5, seed=7)
    first = sampler.draw(7)
    sampler.start(5, 7)
    assert sampler.draw(7) == first
    sampler.start(5, 8)
    assert sampler.draw(5) != first[:5]


def test_seeds_are_distinct_over_positions_members_and_runs():
    seeds = rollout_seeds(0, list(range(100)), 8) + rollout_seeds(1, list(range(100)), 8)
    assert len(set(seeds)) == len(seeds) == 1600
    assert all(type(seed) is int and 0 <= seed < 2**32 for seed in seeds)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_seeds_do_not_depend_on_sharding(ranks):
    positions, share = list(range(40, 48)), 8 // ranks
    whole = rollout_seeds(5, positions, 3)
    parts = [rollout_seeds(5, positions[r * share : (r + 1) * share], 3) for r in range(ranks)]
    assert [seed for part in parts for seed in part] == whole
    assert rollout_seeds(5, positions, 2) == [seed for i, seed in enumerate(whole) if i % 3 < 2]  # nor on the group

"""The order of prompts and the seeds of rollouts follow from positions: resuming and sharding change nothing."""

import numpy as np
import pytest

from mmrl.data import PromptStream, rollout_seeds


def epochs(stream, size, count):
    return [[stream[p] for p in range(e * size, (e + 1) * size)] for e in range(count)]


@pytest.mark.parametrize("size", [1, 2, 7, 50])
def test_each_epoch_shows_every_item_once(size):
    for shown in epochs(PromptStream(range(size), seed=3), size, 4):
        assert sorted(shown) == list(range(size))


def test_epochs_and_seeds_differ():
    first, second, third = epochs(PromptStream(range(50), seed=0), 50, 3)
    assert first != second and second != third and first != third and first != list(range(50))
    assert epochs(PromptStream(range(50), seed=1), 50, 1)[0] != first
    # Seed 1 is not seed 0 one epoch later: neighbouring seeds share no order.
    assert epochs(PromptStream(range(50), seed=1), 50, 1)[0] != second


def test_a_position_is_the_whole_state():
    size = 5
    straight = [PromptStream(range(size), seed=7)[p] for p in range(4 * size)]  # a new stream for every position
    stream = PromptStream(range(size), seed=7)
    shuffled = np.random.default_rng(0).permutation(4 * size).tolist()
    assert {p: stream[p] for p in shuffled} == dict(enumerate(straight))
    resumed = PromptStream(range(size), seed=7)
    assert [resumed[p] for p in range(2 * size, 4 * size)] == straight[2 * size :]  # at the edge of an epoch


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

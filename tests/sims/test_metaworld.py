"""Meta-World, in an environment of its own: PYTHONPATH=. /path/to/its/python -m pytest tests/sims/test_metaworld.py"""

import numpy as np
import pytest

from mmrl.errors import UserError
from mmrl.sims import build, run_episodes

pytest.importorskip("metaworld", reason="needs Meta-World: pip install -e '.[metaworld]' in an environment of its own")

from metaworld.env_dict import ALL_V3_ENVIRONMENTS  # noqa: E402

from mmrl.sims.metaworld import INSTRUCTIONS  # noqa: E402


def actions(count, length):
    return np.random.default_rng(0).uniform(-1, 1, (count, 1, length, 4)).repeat(2, axis=1)


@pytest.mark.parametrize("task", ["door-open-v3", "pick-place-v3", "drawer-open-v3"])
def test_a_group_starts_equal_and_a_seed_is_an_episode_bit_for_bit(task):
    with build("metaworld", 2) as sim:
        first = sim.reset([3, 3], [task, task])
        assert np.array_equal(first.state[0], first.state[1])
        once = [sim.step(chunk).observation.state for chunk in actions(4, 5)]
        assert all(np.array_equal(state[0], state[1]) for state in once)
        other = sim.reset([8, 1 << 33], [task, task])
        assert not np.array_equal(other.state[0], other.state[1])
        sim.step(actions(1, 40)[0])
        sim.reset([8, 3], [task, task])
        twice = [sim.step(chunk).observation.state for chunk in actions(4, 5)]
        assert all(np.array_equal(a[0], b[1]) for a, b in zip(once, twice, strict=True))


def test_the_experts_solve_their_tasks():
    tasks = ["reach-v3", "drawer-open-v3", "button-press-v3", "window-open-v3", "door-open-v3", "push-v3"]
    with build("metaworld", len(tasks)) as sim:
        seeds = range(len(tasks))
        success, length = run_episodes(sim, seeds, tasks, lambda seen, active: sim.expert(active, length=10))
        assert success.sum() >= 5 and length.max() <= 500
        idle, length = run_episodes(sim, seeds, tasks, lambda seen, active: np.zeros((len(tasks), 100, 4)))
        assert not idle.any() and length.tolist() == [500] * len(tasks)


def test_planning_ahead_is_acting_step_by_step():
    with build("metaworld", 1) as one, build("metaworld", 1) as many:
        for sim in (one, many):
            sim.reset([5], ["pick-place-v3"])
        while many.running.any():
            chunk = many.expert(length=7)
            together = many.step(chunk)
            for c in range(7):
                if one.running.any():
                    assert np.array_equal(one.expert()[:, 0], chunk[:, c])
                    one.step(chunk[:, c : c + 1])
            assert np.array_equal(one.observation().state, many.observation().state)
        assert together.success.any() and not one.running.any()


def test_images_instructions_rewards_and_bad_input():
    assert set(INSTRUCTIONS) == set(ALL_V3_ENVIRONMENTS) and len(set(INSTRUCTIONS.values())) == 50
    with build("metaworld", 2, {"observation": "rgb", "reward": "dense", "max_steps": 6}) as sim:
        seen = sim.reset([0, 1], ["drawer-open-v3", "push-v3"])
        assert seen.images.shape == (2, 64, 64, 3) and seen.images.std() > 20 and seen.state.shape == (2, 4)
        assert seen.instructions == ["pull the drawer open", "push the puck to the goal"]
        step = sim.step(sim.expert(length=8))
        assert (step.observation.images != seen.images).any(-1).mean() > 0.005
        assert step.valid.sum(1).tolist() == [6, 6] and step.truncated[:, 5].all()
        assert ((step.reward[:, :6] > 0) & (step.reward[:, :6] < 1)).all()
    for options, says in [
        ({"camera": "corner5"}, "unknown camera 'corner5' .did you mean 'corner"),
        ({"max_steps": 501}, "max_steps must be 1 to 500, not 501"),
        ({"observation": "rgbd"}, "unknown observation 'rgbd' .did you mean 'rgb'"),
    ]:
        with pytest.raises(UserError, match=says):
            build("metaworld", 1, options)

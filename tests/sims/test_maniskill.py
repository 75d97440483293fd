"""ManiSkill, with whatever Vulkan driver there is; `bash scripts/install_renderer.sh` brings a software one."""

import os
import subprocess
import sys

import numpy as np
import pytest

from mmrl.errors import UserError
from mmrl.sims import build, run_episodes

pytest.importorskip("mani_skill", reason="needs ManiSkill: pip install -e '.[maniskill]'")

from mmrl.sims.maniskill.driver import choose_device, describe  # noqa: E402

try:
    choose_device()
except UserError as error:
    pytest.skip(str(error), allow_module_level=True)

PICK, PUSH = "PickCube-v1", "PushCube-v1"


@pytest.fixture(scope="module")
def state():
    with build("maniskill", 2, {"tasks": [PICK, PUSH]}) as sim:
        yield sim


@pytest.fixture(scope="module")
def rgb():
    with build("maniskill", 2, {"observation": "rgb", "image_size": 64}) as sim:
        yield sim


def chunks(count, length, seed=0):
    """The same random actions for both rows."""
    one = np.random.default_rng(seed).uniform(-1, 1, (count, 1, length, 8))
    return np.repeat(one, 2, axis=1)


def play(sim, actions):
    return [sim.step(chunk) for chunk in actions]


def same(a, i, b, j):
    """Whether row i of step a shows what row j of step b shows."""
    return (
        np.array_equal(a.observation.images[i], b.observation.images[j])
        and np.array_equal(a.observation.state[i], b.observation.state[j])
        and np.array_equal(a.reward[i], b.reward[j])
        and np.array_equal(a.valid[i], b.valid[j])
    )


@pytest.mark.parametrize("name", ["state", "rgb"])
def test_a_group_starts_equal_and_a_seed_is_an_episode_bit_for_bit(name, request):
    sim = request.getfixturevalue(name)
    first = sim.reset([3, 3], [PICK, PICK])
    assert np.array_equal(first.images[0], first.images[1]) and np.array_equal(first.state[0], first.state[1])
    actions = chunks(4, 3)
    once = play(sim, actions)
    assert all(same(step, 0, step, 1) for step in once) and once[-1].valid.all()
    assert not np.array_equal(once[0].observation.state, once[-1].observation.state)
    other = sim.reset([8, 9], [PICK, PICK])  # another history
    assert not np.array_equal(other.state[0], other.state[1]) and not np.array_equal(other.state[0], first.state[0])
    play(sim, chunks(2, 5, seed=1))
    again = sim.reset([4, 3], [PICK, PICK])
    assert np.array_equal(again.images[1], first.images[0]) and np.array_equal(again.state[1], first.state[0])
    assert all(same(a, 0, b, 1) for a, b in zip(once, play(sim, actions), strict=True))


def test_large_seeds_start_episodes_of_their_own(state):
    big = 1 << 32
    starts = [state.reset([seed, seed + 1], [PICK, PICK]).state for seed in (0, big, 1 << 31)]
    assert len(np.unique(np.concatenate(starts[:2]), axis=0)) == 4
    assert np.array_equal(starts[1], starts[2])  # folded to 32 bits


def test_images_show_the_scene_and_what_moves_in_it(rgb):
    assert rgb.simulator.image_shape == (64, 64, 3) and rgb.simulator.action_dim == 8
    before = rgb.reset([0, 1], [PICK, PICK])
    red = (before.images[..., 0] > 150) & (before.images[..., 1:] < 60).all(-1)
    assert before.images.std() > 20 and (red.sum((1, 2)) > 2).all()  # the cube
    assert (before.images[0] != before.images[1]).any()
    after = rgb.step(chunks(1, 10)[0]).observation
    assert (after.images != before.images).any(-1).mean() > 0.02
    assert before.instructions == ["pick up the red cube and hold it at the goal position"] * 2


def test_the_full_state_is_for_the_state_observation_only(state, rgb):
    assert state.simulator.image_shape == (0, 0, 3) and state.simulator.state_dim == 42
    assert rgb.simulator.state_dim == 42 - 7 - 3 - 3  # without the cube's pose and its distances to hand and goal
    seen = state.reset([0, 0], [PICK, PUSH])
    assert seen.images.shape == (2, 0, 0, 3)
    assert not seen.state[1, 35:].any() and seen.state[0, 35:].all()  # PushCube's is shorter: padded


def test_a_push_that_reaches_the_target_succeeds_and_ends_the_episode():
    options = {"tasks": [PUSH], "control_mode": "pd_ee_delta_pos"}
    with build("maniskill", 1, options) as sim:
        seen = sim.reset([5], [PUSH])
        taken, success = 0, False
        while sim.running.any():
            # State: 9 joints, 9 speeds, the hand's pose (7), the goal (3), the cube's pose (7).
            hand, cube = seen.state[0, 18:21], seen.state[0, 28:31]
            behind = np.array([cube[0] - 0.1, cube[1], cube[2]])
            ready = hand[0] < cube[0] - 0.04 and abs(hand[1] - cube[1]) < 0.01 and hand[2] < cube[2] + 0.02
            towards = np.array([0.1, 0, 0]) if ready else behind - hand
            step = sim.step(np.append(np.clip(towards / 0.1, -1, 1), -1)[None, None])
            seen, taken, success = step.observation, taken + 1, success or step.success.any()
        assert success and step.terminated.all() and not step.truncated.any() and step.reward[0, 0] == 1
        assert 5 < taken < 50


def test_time_runs_out_where_maniskill_says(state):
    state.reset([1, 1], [PICK, PUSH])
    idle = state.step(np.zeros((2, 60, 8)))
    assert idle.valid.sum(1).tolist() == [50, 50] and idle.truncated[:, 49].all() and not idle.success.any()
    assert not state.running.any()


def test_the_dense_reward_grows_towards_the_cube():
    with build("maniskill", 1, {"reward": "dense", "control_mode": "pd_ee_delta_pos", "max_steps": 10}) as sim:
        seen = sim.reset([5], [PICK])
        to_cube = seen.state[0, -6:-3]
        step = sim.step(np.tile(np.append(np.clip(to_cube / 0.1, -1, 1), 1), (1, 12, 1)))
        assert step.valid.sum() == 10 and step.truncated[0, 9]
        assert 0 < step.reward[0, 0] < step.reward[0, 3] < 1


def test_a_video_shows_the_goal_that_the_policy_does_not_see(rgb):
    with build("maniskill", 1, {"observation": "video", "image_size": 96}) as sim:
        filmed = sim.reset([0], [PICK]).images

        def green(images):
            return ((images[..., 1] > 120) & (images[..., 0] < 90) & (images[..., 2] < 90)).sum()

        assert filmed.shape == (1, 96, 96, 3) and green(filmed) > 5
        assert green(rgb.reset([0, 0], [PICK, PICK]).images) == 0


def test_what_does_not_exist_is_named(state):
    for options, says in [
        ({"tasks": ["PickCub-v1"]}, "unknown task 'PickCub-v1' .did you mean 'PickCube-v1'"),
        ({"observation": "rgbd"}, "unknown observation 'rgbd' .*known: state, rgb, video"),
        ({"control_mode": "pd_ee"}, "control_mode=pd_ee.*pd_ee_delta_pose"),
        ({"tasks": ["PickSingleYCB-v1"]}, "ycb.* mani_skill.utils.download_asset PickSingleYCB-v1"),
        ({"tasks": ["PickCubeWidowXAI-v1"]}, "Robot widowxai .*mani_skill.utils.download_asset widowxai"),
        ({"tasks": ["StackPyramid-v1"], "reward": "dense"}, "StackPyramid-v1 cannot be made with .*reward=dense"),
        ({"tasks": ["TwoRobotPickCube-v1"]}, "mmrl has no instruction for TwoRobotPickCube-v1; set instructions="),
        ({"tasks": [PICK, "PickCubeSO100-v1"]}, "cannot be trained together: their actions have 8 and 6 numbers"),
    ]:
        with pytest.raises(UserError, match=says):
            build("maniskill", 1, options)
    with pytest.raises(UserError, match="known: PushCube-v1 with control_mode=pd_ee_delta_pos"):
        state.reset([1, 1], [PICK, PICK])
        state.expert()


def test_a_missing_driver_is_named_with_the_command_that_brings_one():
    assert describe()
    lost = subprocess.run(
        [sys.executable, "-c", "from mmrl.sims import renderers; print(*renderers()['maniskill'], sep=chr(10))"],
        env=os.environ | {"VK_ICD_FILENAMES": "/nowhere.json", "VK_DRIVER_FILES": "", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    said, mend = lost.stdout.splitlines()
    assert "no Vulkan driver" in said and mend == "bash scripts/install_renderer.sh" and mend in said


def test_the_expert_pushes_and_says_what_it_can_not():
    with build("maniskill", 2, {"tasks": [PUSH], "control_mode": "pd_ee_delta_pos"}) as sim:
        success, length = run_episodes(sim, [5, 6], [PUSH, PUSH], lambda _, active: sim.expert(active))
        assert success.all() and (length < 30).all()
        sim.reset([5, 6], [PUSH, PUSH])
        assert sim.expert(np.array([True, False]))[1].tolist() == [[0, 0, 0, 0]]
        with pytest.raises(UserError, match="one action at a time"):
            sim.expert(length=2)

"""LIBERO, in an environment that has it: bash scripts/test.sh -m slow tests/sims/test_libero.py"""

import numpy as np
import pytest

from mmrl.errors import UserError
from mmrl.sims import build

pytest.importorskip("libero", reason="needs LIBERO: pip install -e '.[libero]'")
pytest.importorskip("mujoco")

from mmrl.sims.mujoco.gl import choose_backend  # noqa: E402

try:
    choose_backend()
except UserError as error:
    pytest.skip(str(error), allow_module_level=True)

from mmrl.sims.libero.simulator import (  # noqa: E402
    EVALUATION_STARTS,
    IDLE,
    ControlEnv,
    Libero,
    _numpy_seed,
    _tasks,
    load_initial_states,
)

pytestmark = pytest.mark.slow
BOWL, OTHER = "libero_spatial/0", "libero_spatial/1"
BOTH = ["agentview", "robot0_eye_in_hand"]


@pytest.fixture(scope="module")
def sim():
    with build("libero", 2, {"cameras": BOTH, "image_size": 64}) as made:
        yield made


def chunks(count, length):
    one = np.random.default_rng(0).uniform(-1, 1, (count, 1, length, 7))
    return np.repeat(one, 2, axis=1)


def same(a, i, b, j):
    return np.array_equal(a.images[i], b.images[j]) and np.array_equal(a.state[i], b.state[j])


def test_a_group_starts_equal_and_a_seed_is_an_episode_bit_for_bit(sim):
    for seed in (3, 1 << 33):  # a published start, and one of the training kind
        first = sim.reset([seed, seed], [BOWL, BOWL])
        assert same(first, 0, first, 1)
        once = [sim.step(chunk) for chunk in chunks(3, 4)]
        assert all(same(step.observation, 0, step.observation, 1) for step in once)
        sim.reset([7, 8], [BOWL, BOWL])  # another history, the fingers closed
        sim.step(np.zeros((2, 9, 7)))
        again = sim.reset([9, seed], [BOWL, BOWL])
        assert same(again, 1, first, 0)
        twice = [sim.step(chunk) for chunk in chunks(3, 4)]
        assert all(same(a.observation, 0, b.observation, 1) for a, b in zip(once, twice, strict=True))
        assert not same(once[0].observation, 0, once[2].observation, 0)


FREE = [7 * k + d for k in range(5) for d in (0, 1)]  # where the five free objects lie on the table, after the robot


def objects(sim, seed):
    """x and y of the free objects of row 0 at the start."""
    sim.reset([seed, seed], [BOWL, BOWL])
    return sim.simulator._rows[0].scene._data.qpos[9:][FREE]


def test_training_starts_are_none_of_the_evaluation_starts(sim):
    published = load_initial_states(next(_tasks("libero_spatial", "openvla")).starts)
    assert len(published) == EVALUATION_STARTS
    published = published[:, 10:][:, FREE]  # behind the time and the robot's nine joints
    for seed in (0, 3, 17, 49):
        distance = np.abs(published - objects(sim, seed)).max(1)
        assert distance.argmin() == seed and distance.min() < 1e-3  # they came to rest
    drawn = [objects(sim, seed) for seed in (50, 51, 1 << 32, (1 << 32) + 1)]
    for start in drawn:
        assert np.abs(published - start).max(1).min() > 3e-3
    assert min(np.abs(a - b).max() for i, a in enumerate(drawn) for b in drawn[:i]) > 3e-3


def test_it_moves_and_shows_what_libero_itself_would():
    """In the published set-up: LIBERO's own class with its hard reset, and actions as OpenVLA-OFT converts them."""
    with build("libero", 1, {"cameras": BOTH, "shadows": True}) as ours:
        first = ours.reset([3], [BOWL])
        actions = np.random.default_rng(1).uniform(-1, 1, (48, 7))
        actions[:, 2] -= 0.5  # down to where things touch
        actions[:, 6] = [1, 1, 0, 0, 0.2, 0.9, 0.4, 0.6] * 6
        step = ours.step(actions[None])
        qpos = ours.simulator._rows[0].scene._data.qpos.copy()
    task = next(_tasks("libero_spatial", "openvla"))
    theirs = ControlEnv(bddl_file_name=task.scene, has_offscreen_renderer=True, use_camera_obs=True)

    def image():
        seen = theirs.env._get_observations(force_update=True)
        return np.concatenate([seen[f"{camera}_image"][::-1, ::-1] for camera in BOTH], axis=1)

    with _numpy_seed([0]):
        theirs.reset()
    theirs.set_init_state(load_initial_states(task.starts)[3])
    for _ in range(10):
        theirs.step(IDLE)
    np.testing.assert_allclose(image().astype(int), first.images[0], atol=2)
    for action, gripper in zip(actions.clip(-1, 1), [-1, -1, 1, 1, 1, -1, 1, -1] * 6, strict=True):
        seen, *_ = theirs.step(np.append(action[:6], gripper))
    assert np.array_equal(theirs.sim.data.qpos, qpos)
    np.testing.assert_allclose(image().astype(int), step.observation.images[0], atol=2)
    np.testing.assert_allclose(step.observation.state[0, :3], seen["robot0_eef_pos"], atol=2e-3)  # a substep apart
    theirs.close()


def test_images_instructions_and_time(sim):
    seen = sim.reset([0, 0], [BOWL, OTHER])
    assert seen.images.shape == (2, 64, 128, 3) and seen.state.shape == (2, 8)
    assert seen.images.std() > 20 and (seen.images[0] != seen.images[1]).mean() > 0.05
    assert seen.instructions == [
        "pick up the black bowl between the plate and the ramekin and place it on the plate",
        "pick up the black bowl next to the ramekin and place it on the plate",
    ]
    simulator = sim.simulator
    assert simulator.tasks == tuple(f"libero_spatial/{i}" for i in range(10))
    assert {task.max_steps for task in simulator._tasks_by_name.values()} == {220}
    assert {task.max_steps for task in Libero(1, step_limit="rlinf", suites=["libero_10"])._tasks_by_name.values()} == {
        512
    }
    assert len(Libero(1, suites=["libero_90", "libero_goal"]).tasks) == 100
    for row in simulator._rows:
        row.steps = 218
    step = sim.step(np.tile(IDLE, (2, 4, 1)))
    assert step.valid.sum(1).tolist() == [2, 2] and step.truncated[:, 1].all() and not step.success.any()


def test_perturbed_words_and_tasks_are_asked_for_as_their_scenes_say():
    def asked(suite):
        return next(_tasks(suite, "openvla")).instruction

    own = "pick up the black bowl between the plate and the ramekin and place it on the plate"
    assert asked("libero_spatial") == asked("libero_spatial_swap") == own
    assert asked("libero_spatial_lan") == "lift the black bowl between the plate and ramekin and set it on the plate"
    assert asked("libero_goal") == "open the middle drawer of the cabinet"
    assert asked("libero_goal_task") == "open the bottom drawer of the cabinet"


def test_a_bowl_on_the_plate_is_a_success():
    with build("libero", 1, {"image_size": 16}) as sim:
        sim.reset([0], [BOWL])
        scene = sim.simulator._rows[0].scene
        assert not scene._env.check_success()
        plate = scene._env.sim.data.get_joint_qpos("plate_1_joint0").copy()
        plate[2] += 0.02
        scene._env.sim.data.set_joint_qpos("akita_black_bowl_1_joint0", plate)
        step = sim.step(np.tile(IDLE, (1, 30, 1)))
        assert step.success.any() and step.terminated.any() and step.reward.sum() == 1


def test_without_cameras_the_same_happens_and_nothing_is_drawn(sim):
    first, step = sim.reset([3, 3], [BOWL, BOWL]), sim.step(next(iter(chunks(1, 8))))
    with build("libero", 2, {"cameras": []}) as blind:
        unseen, moved = blind.reset([3, 3], [BOWL, BOWL]), blind.step(next(iter(chunks(1, 8))))
    assert unseen.images.shape == (2, 0, 0, 3)
    assert np.array_equal(unseen.state, first.state)
    assert np.array_equal(moved.observation.state, step.observation.state)


def test_two_workers_play_what_one_plays():
    """Two tasks from a published start to their ends: where the robot is after each chunk, bit for bit."""
    tasks, seen = [BOWL, OTHER], []
    for workers in (1, 2):
        actions = np.random.default_rng(2)
        with build("libero", 2, {"cameras": []}, workers=workers, deadline_s=600) as sim:
            states, length = [sim.reset([7] * 2, tasks).state], np.zeros(2, int)
            while sim.running.any():
                step = sim.step(actions.uniform(-1, 1, (2, 8, 7)))
                states.append(step.observation.state)
                length += step.valid.sum(1)
        assert length.tolist() == [220] * 2
        seen.append(np.stack(states))
    assert np.array_equal(*seen) and not np.array_equal(seen[0][-1, 0], seen[0][-1, 1])


def test_what_does_not_exist_is_named():
    for options, says in [
        ({"suites": ["libero_spatail"]}, "unknown suite 'libero_spatail' .did you mean 'libero_spatial'"),
        ({"cameras": ["front"]}, "unknown camera 'front'; known: agentview, robot0_eye_in_hand"),
        ({"step_limit": "openvl"}, "unknown step_limit 'openvl' .did you mean 'openvla'"),
        ({"suites": ["libero_mine"]}, "openvla published no step limit for libero_mine; set step_limit to a number"),
        ({"suites": ["libero_object_with_trigger"]}, "; `libero-pro audit` lists missing files"),
        ({"gripper": "franka"}, "unknown gripper 'franka'"),
        ({"image_size": 4}, "image_size must be at least 8 pixels, not 4"),
    ]:
        with pytest.raises(UserError, match=says):
            build("libero", 1, options)

import gc
import itertools
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mmrl.errors import UserError
from mmrl.sims import build, run_episodes

mujoco = pytest.importorskip("mujoco")

from mmrl.sims.mujoco import TASKS  # noqa: E402
from mmrl.sims.mujoco.arm import HIGH, LOW, inverse_kinematics  # noqa: E402
from mmrl.sims.mujoco.control import CONTROLS  # noqa: E402
from mmrl.sims.mujoco.gl import choose_backend  # noqa: E402
from mmrl.sims.mujoco.scene import CUBE, compile_model  # noqa: E402
from mmrl.sims.mujoco.tabletop import privileged_state  # noqa: E402
from mmrl.sims.mujoco.tasks import COLOURS, TableView, placed, push_expert, push_progress, pushed, reached, stacked  # noqa: E402

try:
    choose_backend()
except UserError as error:
    pytest.skip(str(error), allow_module_level=True)

SMALL = {"image_size": 16, "threads": 1}


@pytest.fixture
def tabletop():
    opened = []

    def make(count, **options):
        opened.append(build("tabletop", count, SMALL | options))
        return opened[-1]

    yield make
    for sim in opened:
        sim.close()


def equal(a, b):
    return np.array_equal(a.images, b.images) and np.array_equal(a.state, b.state) and a.instructions == b.instructions


def random_actions(seed, *shape):
    return np.random.default_rng(seed).uniform(-1, 1, (*shape, 4))


def test_what_no_camera_measures_comes_behind_the_state(tabletop):
    """And changes nothing else."""
    plain, told = tabletop(3), tabletop(3, privileged=True)
    starts = ([1, 2, 3], ["lift", "push", "stack"])
    actions = random_actions(0, 3, 4)
    first = plain.reset(*starts), told.reset(*starts)
    then = plain.step(actions).observation, told.step(actions).observation
    for one, other in (first, then):
        assert np.array_equal(one.images, other.images) and np.array_equal(one.state, other.state[:, :5])
        assert other.state.shape == (3, 15)
    for row, world in enumerate(told.simulator._worlds):
        view, found = world.view(), told.observation().state[row, 5:] / 10
        np.testing.assert_allclose(found[:3] + view.tip, view.cubes[0], atol=1e-6)
        np.testing.assert_allclose(found[3:6] + view.cubes[0], view.goal, atol=1e-6)
        np.testing.assert_allclose(found[6:9], view.cubes[0], atol=1e-6)
        assert found[9] == 0
    # Held: the fingers are told to close, and what stops them is cube 0.
    view = told.simulator._worlds[0].view()
    grasped = replace(view, closing=True, opening=0.5, tip=view.cubes[0])
    assert privileged_state(grasped)[9] == 1 and not privileged_state(grasped)[:3].any()


# The arm and the tasks


def test_the_closed_form_puts_the_fingertips_where_they_belong():
    model = compile_model(2, 16)
    data, tip = mujoco.MjData(model), model.site("tip").id
    corners = np.array(np.meshgrid(*zip(LOW, HIGH, strict=True))).reshape(3, -1).T
    for point in [*corners, *np.random.default_rng(0).uniform(LOW, HIGH, (50, 3))]:
        joints = np.array(inverse_kinematics(point))
        assert (model.jnt_range[:5, 0] < joints).all() and (joints < model.jnt_range[:5, 1]).all()
        data.qpos[:5] = joints
        mujoco.mj_kinematics(model, data)
        np.testing.assert_allclose(data.site_xpos[tip], point, atol=1e-12)
        np.testing.assert_allclose(data.site_xmat[tip].reshape(3, 3), np.eye(3), atol=1e-12)  # hangs down, unturned


@pytest.mark.parametrize("task", list(TASKS))
def test_the_expert_solves_its_task(tabletop, task):
    sim = tabletop(6)
    success, length = run_episodes(sim, range(500, 506), [task] * 6, lambda _, active: sim.expert(active, length=4))
    assert success.sum() >= 5  # 0.99 or more over 200 seeds, see scripts/bench/robots.py
    assert length[success].max() < TASKS[task].max_steps
    assert sim.counters["dropped_episodes"] == 0


@pytest.mark.parametrize(
    "task", [t if t in ("push", "lift") else pytest.param(t, marks=pytest.mark.slow) for t in TASKS]
)
def test_the_expert_names_places_too(tabletop, task):
    """It does the same with both controls, up to rounding: what contacts make of it may differ a little."""
    sim = tabletop(6, control="position")
    success, length = run_episodes(sim, range(500, 506), [task] * 6, lambda _, active: sim.expert(active, length=4))
    assert success.sum() >= 5 and length[success].max() < TASKS[task].max_steps


def test_controls():
    """The box of the fingertips is 0.32 wide, 0.48 deep and 0.246 high; a step is 0.03."""
    delta, position = CONTROLS["delta"], CONTROLS["position"]
    start, right = np.array([0.35, 0.0, 0.1]), np.array([0.0, 0.5, 0.0, 1.0])
    np.testing.assert_allclose(delta.setpoint_after(start, right, 0.03), [0.35, 0.015, 0.1])
    np.testing.assert_allclose(delta.setpoint_after(start, right, 0.02), [0.35, 0.01, 0.1])
    np.testing.assert_allclose(delta.setpoint_after(start, right * -4, 0.03), [0.35, -0.03, 0.1])  # clipped to 1
    # Corners and middle of the box: x 0.25 to 0.57, y -0.24 to 0.24, z 0.014 to 0.26.
    middle = np.array([0.41, 0.0, 0.137])
    np.testing.assert_allclose(position.setpoint_after(middle, np.zeros(4), 0.03), middle)
    beside, at_edge = np.array([0.41, 0.22, 0.137]), np.array([0, 1, 0, 1])
    np.testing.assert_allclose(position.setpoint_after(beside, at_edge, 0.03), [0.41, 0.24, 0.137])
    np.testing.assert_allclose(position.setpoint_after(middle, -at_edge, 0.03), [0.41, -0.03, 0.137])
    np.testing.assert_allclose(position.setpoint_after(middle, -at_edge, 0.02), [0.41, -0.02, 0.137])
    # A place beyond the box is its corner, 0.16 and 0.24 away: 0.2884 in all.
    found = position.setpoint_after(middle, np.array([4, 1, 0, 1]), 0.03)
    np.testing.assert_allclose(found, [0.41 + 0.03 * 0.16 / 0.28844, 0.03 * 0.24 / 0.28844, 0.137], atol=1e-6)
    # An aim 0.05 away, 3-4-5: a full step towards it; an aim 0.015 away is reached.
    far, near = np.array([0.38, 0.04, 0.1, -1]), np.array([0.359, 0.012, 0.1, 1])
    np.testing.assert_allclose(delta.action(start, far, 0.03), [0.6, 0.8, 0, -1])
    np.testing.assert_allclose(delta.action(start, near, 0.03), [0.3, 0.4, 0, 1], atol=1e-12)
    np.testing.assert_allclose(delta.action(start, near, 0.02), [0.45, 0.6, 0, 1], atol=1e-12)
    corner = np.array([0.25, 0.24, 0.137, 1])
    np.testing.assert_allclose(position.action(start, corner, 0.03), [-1, 1, 0, 1], atol=1e-12)
    for aim, step in itertools.product((far, near), (0.03, 0.01)):  # both lead to the same setpoint
        moved = delta.setpoint_after(start, delta.action(start, aim, step), step)
        np.testing.assert_allclose(moved, position.setpoint_after(start, position.action(start, aim, step), step))


def test_a_push_goes_slower(tabletop):
    """By 1.6 cm a step, where every other task goes by 3, whatever the control."""
    tasks, up = list(TASKS), np.array([0.0, 0.0, 1.0, -1.0])  # the box's top, and straight up
    for control in CONTROLS:
        sim = tabletop(5, control=control)
        sim.reset([0] * 5, tasks)
        worlds = sim.simulator._worlds
        before = np.array([world.setpoint for world in worlds])
        actions = np.tile(up, (5, 1, 1))
        if control == "position":  # straight up from where each is
            actions[:, 0, :2] = 2 * (before[:, :2] - LOW[:2]) / (HIGH - LOW)[:2] - 1
        sim.step(actions)
        gone = np.array([world.setpoint for world in worlds]) - before
        expected = np.array([0.016 if task == "push" else 0.03 for task in tasks])
        np.testing.assert_allclose(gone[:, 2], expected, atol=1e-9)
        np.testing.assert_allclose(gone[:, :2], 0, atol=1e-9)


def test_an_expert_knows_how_far_a_step_of_its_task_goes(tabletop):
    """To go up by 0.8 cm it takes half of a step when pushing, and 4 / 15 of one otherwise."""
    sim = tabletop(2)
    sim.reset([0] * 2, ["push", "lift"])
    for world in sim.simulator._worlds:
        goal = np.append(world.setpoint + [0, 0, 0.008], 1.0)
        world.task = replace(world.task, expert=lambda view, goal=goal: goal)
    np.testing.assert_allclose(sim.expert(length=1)[:, 0], [[0, 0, 0.5, 1], [0, 0, 4 / 15, 1]], atol=1e-6)


def test_the_one_who_pushes_names_the_pad_from_behind_the_cube():
    """The cube is 0.1 before its goal along x; closed fingers that are low and behind it go to 2.2 cm before the goal.
    From elsewhere they go behind the cube first: beside it 7 cm high, or down where they are over that place."""
    cube, goal = (0.4, 0.0, CUBE), (0.5, 0.02, CUBE)
    low_behind = looking(tip=(0.35, 0.01, 0.02), closing=True, cube=cube, goal=goal)
    np.testing.assert_allclose(push_expert(low_behind), [0.478, 0.02, 0.02, 1])
    for tip in ((0.35, 0.03, 0.02), (0.45, 0.0, 0.02), (0.35, 0.0, 0.06)):  # aside, in front of it, high
        wanted = push_expert(looking(tip=tip, closing=True, cube=cube, goal=goal))
        np.testing.assert_allclose(wanted[:2], [0.35, 0.0])
    high = push_expert(looking(tip=(0.45, 0.0, 0.02), closing=True, cube=cube, goal=goal))
    assert high[2] == pytest.approx(0.07) and wanted[2] == pytest.approx(0.02)
    backwards = looking(tip=(0.4, 0.15, 0.02), closing=True, cube=(0.4, 0.1, CUBE), goal=(0.41, -0.05, CUBE))
    np.testing.assert_allclose(push_expert(backwards), [0.41, -0.028, 0.02, 1])


def test_the_arm_goes_to_the_place_that_is_named(tabletop):
    """The middle of the box is 0, 0, 0 in the state too; a move of nothing would leave the arm at home, at -0.3."""
    sim = tabletop(1, control="position", end_on_success=False)
    sim.reset([0], ["stack"])
    seen = sim.step(np.zeros((1, 12, 4))).observation
    np.testing.assert_allclose(seen.state[0, :3], 0, atol=0.03)


def test_a_control_that_is_none():
    with pytest.raises(UserError, match="control must be 'delta' or 'position', not 'angle'"):
        build("tabletop", 1, SMALL | {"control": "angle"})


def test_doing_nothing_solves_nothing(tabletop):
    sim = tabletop(10)
    success, length = run_episodes(sim, [0, 1] * 5, list(TASKS) * 2, lambda _, active: np.zeros((10, 60, 4)))
    assert not success.any() and length.tolist() == [TASKS[task].max_steps for task in TASKS] * 2


def test_a_chunk_of_the_expert_is_what_it_does_step_by_step(tabletop):
    one, many = tabletop(2), tabletop(2)
    for sim in (one, many):
        sim.reset([3, 4], ["lift", "reach"])
    while many.running.any():
        chunk = many.expert(length=5)
        together = many.step(chunk)
        for c in range(5):
            active = one.running
            assert np.array_equal(one.expert(active)[active, 0], chunk[active, c])
            step = one.step(chunk[:, c : c + 1])
            assert np.array_equal(step.valid[:, 0], together.valid[:, c])
            assert np.array_equal(step.terminated[:, 0], together.terminated[:, c])
        assert equal(one.observation(), many.observation())
        assert not chunk[~together.valid].any()  # nothing is planned beyond the end
    assert together.success.any()


@pytest.mark.parametrize("task", list(TASKS))
def test_every_word_of_the_instruction_is_needed(tabletop, task):
    sim = tabletop(12)
    seen = sim.reset(range(12), [task] * 12)
    assert len(set(seen.instructions)) > 4
    for world, instruction in zip(sim.simulator._worlds, seen.instructions, strict=True):
        cubes, pads = world.scene.cube_colours, world.scene.pad_colours
        colour = instruction.split(" cube")[0].split()[-1]
        assert colour == cubes[0] and len(set(cubes)) >= 2
        if task in ("reach", "lift"):  # the colour leaves two cubes, the side one
            left, right = sorted((i for i in range(3) if cubes[i] == colour), key=lambda i: world.scene.cubes[i, 1])
            assert (left if instruction.endswith("on the left") else right) == 0
        elif task == "stack":
            assert len(set(cubes)) == 3 and instruction.endswith(f"on the {cubes[1]} cube")
        else:
            assert len(set(cubes)) == 3 and len(set(pads)) == 2 and instruction.endswith(f"the {pads[0]} pad")


@pytest.mark.parametrize("task", ["push", "pick_and_place"])
def test_of_two_cubes_and_two_pads_no_two_have_one_colour(tabletop, task):
    """And with fewer colours no two cubes, nor two pads."""
    sim = tabletop(8, objects=2)
    sim.reset(range(8), [task] * 8)
    for world in sim.simulator._worlds:
        assert len({*world.scene.cube_colours, *world.scene.pad_colours}) == 4
    few = tabletop(8, objects=2, colours=["red", "blue"])
    few.reset(range(8), [task] * 8)
    for world in few.simulator._worlds:
        assert set(world.scene.cube_colours) == set(world.scene.pad_colours) == {"red", "blue"}


def looking(tip=(0.4, 0, 0.2), opening=1.0, closing=False, cube=(0.4, 0, CUBE), speed=0.0, goal=(0.4, 0, CUBE)):
    cubes = np.array([cube, (0.3, 0.1, CUBE)])
    return TableView(np.array(tip), opening, closing, cubes, speed, np.array(goal))


def test_success_by_hand():
    assert reached(looking(tip=(0.41, 0.01, 0.07))) and not reached(looking(tip=(0.41, 0.01, 0.08)))
    assert not reached(looking(tip=(0.43, 0, 0.06)))
    assert pushed(looking(cube=(0.435, -0.035, CUBE))) and not pushed(looking(cube=(0.4, 0.045, CUBE)))
    assert not pushed(looking(cube=(0.4, 0, 0.05)))
    assert placed(looking()) and not placed(looking(closing=True, opening=0.55)) and not placed(looking(speed=0.2))
    top = (0.3, 0.1, 3 * CUBE)
    assert stacked(looking(cube=(0.305, 0.1, 3 * CUBE), goal=top))
    assert not stacked(looking(cube=(0.305, 0.1, 3 * CUBE), goal=top, closing=True, opening=0.55))
    assert not stacked(looking(cube=(0.325, 0.1, 3 * CUBE), goal=top))
    assert not stacked(looking(cube=(0.3, 0.1, CUBE), goal=top))


def test_the_progress_of_pushing_knows_the_side_of_the_cube():
    """1 - tanh(0.8) = 0.335963 at a decimetre: 0.7 of it for the cube that far from its goal, 0.3 for fingertips in
    front of it; behind it they have all of the 0.3."""
    for goal, behind, front in (
        ((0.5, 0.0, CUBE), (0.35, 0.0, 0.02), (0.45, 0.0, 0.02)),
        ((0.4, -0.1, CUBE), (0.4, 0.05, 0.02), (0.4, -0.05, 0.02)),
    ):
        assert push_progress(looking(tip=behind, goal=goal)) == pytest.approx(0.535174, abs=1e-6)
        assert push_progress(looking(tip=front, goal=goal)) == pytest.approx(0.335963, abs=1e-6)


def test_the_shaped_reward_adds_up_to_the_progress_made(tabletop):
    sim = tabletop(5, reward="shaped")
    tasks = list(TASKS)
    sim.reset([0] * 5, tasks)
    worlds = sim.simulator._worlds
    before = np.array([world.task.progress(world.view()) for world in worlds])
    total = np.zeros(5)
    while sim.running.any():
        step = sim.step(sim.expert(length=4))
        total += step.reward.sum(1)
    after = np.array([world.task.progress(world.view()) for world in worlds])
    np.testing.assert_allclose(total, after - before + 1, atol=1e-5)  # 1 for the success
    assert (after - before > 0.2).all() and (before >= 0).all() and (after <= 1).all()


def test_an_episode_can_go_on_after_success(tabletop):
    sim = tabletop(1, end_on_success=False)
    sim.reset([0], ["reach"])
    steps = [sim.step(sim.expert(length=5)) for _ in range(4)]
    success = np.concatenate([step.success[0] for step in steps])
    assert success.sum() > 5 and success[-1] and not any(step.terminated.any() for step in steps)
    assert steps[-1].truncated[0, -1] and not sim.running[0]


# Determinism


def play(sim, seeds, tasks, chunks):
    seen = [sim.reset(seeds, tasks)]
    rewards = []
    for chunk in chunks:
        step = sim.step(chunk)
        seen.append(step.observation)
        rewards.append(np.stack([step.reward, step.valid, step.success]))
    return seen, np.array(rewards)


def test_one_and_two_threads_give_the_same_bits(tabletop):
    tasks, chunks = [*TASKS, "stack"], random_actions(0, 4, 6, 5)
    (a, rewards_a), (b, rewards_b) = (
        play(tabletop(6, threads=threads, image_size=64, reward="shaped"), range(6), tasks, chunks)
        for threads in (1, 2)
    )
    assert all(equal(x, y) for x, y in zip(a, b, strict=True)) and np.array_equal(rewards_a, rewards_b)
    assert not np.array_equal(a[0].images, a[-1].images)


def test_a_group_starts_equal_and_the_same_actions_keep_it_equal(tabletop):
    sim = tabletop(4, threads=2, image_size=64)
    seen, _ = play(sim, [5, 5, 5, 6], ["push"] * 4, np.tile(random_actions(1, 3, 1, 4), (1, 4, 1, 1)))
    for observation in seen:
        for row in (1, 2):
            assert equal(observation.select([0]), observation.select([row]))
        assert not np.array_equal(observation.images[0], observation.images[3])


def test_an_episode_starts_at_rest(tabletop):
    sim = tabletop(5)
    first = sim.reset(range(5), list(TASKS))
    after = sim.step(np.zeros((5, 1, 4))).observation
    np.testing.assert_allclose(after.state, first.state, atol=0.02)  # of a box 32 cm wide: 3 mm
    for world in sim.simulator._worlds:
        np.testing.assert_allclose(world.view().cubes[:, :2], world.scene.cubes, atol=1e-3)


def test_nothing_is_left_of_the_episode_before(tabletop):
    sim, fresh, chunks = tabletop(2), tabletop(2), random_actions(2, 4, 2, 5)
    play(sim, [1, 2], ["stack", "push"], random_actions(3, 6, 2, 5))
    (a, _), (b, _) = play(sim, [7, 8], ["lift", "reach"], chunks), play(fresh, [7, 8], ["lift", "reach"], chunks)
    assert all(equal(x, y) for x, y in zip(a, b, strict=True))


def test_episodes_of_restarted_rows_are_those_of_a_fresh_reset(tabletop):
    auto, fixed = tabletop(2), tabletop(2)
    auto.reset([11, 12], ["reach", "lift"])
    log = [[], []]  # per row: (seed, chunk, valid, final observation)
    for t in range(16):
        seeds, chunk = list(auto.seeds), random_actions(t, 2, 4)
        step = auto.step(chunk)
        for row in range(2):
            log[row].append((seeds[row], chunk[row], step.valid[row], step.observation.select([row])))
            if not auto.running[row]:
                auto.restart([row], [seeds[row] + 100], [auto.tasks[row]])
    assert len({seed for seed, *_ in log[0]}) >= 3 and len({seed for seed, *_ in log[1]}) >= 2
    for row, task in enumerate(["reach", "lift"]):
        for seed in {seed for seed, *_ in log[row]}:
            fixed.reset([seed] * 2, [task] * 2)
            for _, chunk, valid, final in (entry for entry in log[row] if entry[0] == seed):
                step = fixed.step(np.stack([chunk, chunk]))
                assert np.array_equal(step.valid[0], valid) and equal(step.observation.select([0]), final)
            assert seed == auto.seeds[row] or not fixed.running.any()


# Images


def test_images_show_the_colours_where_the_cubes_are(tabletop):
    sim = tabletop(4, image_size=64)
    seen = sim.reset(range(4), ["lift"] * 4)
    assert seen.images.std(axis=(1, 2, 3)).min() > 10
    for row, world in enumerate(sim.simulator._worlds):
        image = seen.images[row].astype(float) / 255
        for colour in set(world.scene.cube_colours):
            direction = np.array(COLOURS[colour]) / np.linalg.norm(COLOURS[colour])
            bright = np.linalg.norm(image, axis=-1)
            close = (image @ direction > 0.95 * bright) & (bright > 0.2)
            cubes = [i for i, other in enumerate(world.scene.cube_colours) if other == colour]
            assert 8 * len(cubes) < close.sum() < 120 * len(cubes)  # a cube is 5 to 8 pixels wide
            if len(cubes) == 1:  # y goes right, x comes nearer and so down
                x, y = world.scene.cubes[cubes[0]]
                down, right = np.argwhere(close).mean(0)
                assert abs(right - 31.5 - 122 * y) < 8 and abs(down - 34 - 100 * (x - 0.41)) < 8
            if len(cubes) == 2:  # "left" is left in the image
                columns = np.flatnonzero(close.any(0))
                left = columns[columns < columns.mean()].mean()
                right = columns[columns > columns.mean()].mean()
                ys = sorted(world.scene.cubes[cubes, 1])
                assert right - left > 4 and abs((right - left) - (ys[1] - ys[0]) * 122) < 12


def test_only_active_rows_are_rendered(tabletop, monkeypatch):
    sim = tabletop(3)
    sim.reset(range(3), ["reach"] * 3)
    renderer, drawn = sim.simulator._workers[0].renderer, []
    render = renderer.render
    monkeypatch.setattr(renderer, "render", lambda *a: (drawn.append(a[1]), render(*a)))
    sim.step(random_actions(0, 3, 4), active=np.array([False, True, False]))
    assert len(drawn) == 1 and drawn[0] is sim.simulator._worlds[1].data


# What can go wrong


def test_nan_never_reaches_the_physics(tabletop):
    sim = tabletop(2)
    sim.reset([0, 0], ["lift"] * 2)
    bad = random_actions(0, 1, 3)
    bad = np.concatenate([bad, bad])
    bad[0, 1], bad[1, 1] = [np.nan, np.inf, 0.5, np.nan], [0.0, 0.0, 0.5, 0.0]
    step = sim.step(bad)
    assert sim.counters["nan_actions"] == 3 and np.isfinite(step.observation.state).all()
    assert equal(step.observation.select([0]), step.observation.select([1]))


def test_unstable_physics_drops_one_episode(tabletop, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # MuJoCo writes its log into the working directory
    sim = tabletop(2)
    sim.reset([0, 1], ["lift"] * 2)
    sim.simulator._worlds[0].data.qvel[:] = np.nan
    with pytest.warns(RuntimeWarning, match="environment 0 .*the physics became unstable"):
        step = sim.step(np.zeros((2, 3, 4)))
    assert step.dropped.tolist() == [True, False] and step.valid.tolist() == [[False] * 3, [True] * 3]
    again, clean = sim.reset([4, 4], ["push"] * 2), tabletop(1).reset([4], ["push"])
    assert equal(again.select([0]), clean) and equal(again.select([1]), clean)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image_size": 4}, "image_size must be at least 8 pixels, not 4"),
        ({"objects": 1}, "objects must be 2 to 4, not 1"),
        ({"reward": "dense"}, "reward must be 'sparse' or 'shaped', not 'dense'"),
        ({"colours": ["red", "grean"]}, "unknown colour 'grean' .did you mean 'green'"),
        ({"colours": ["red"]}, "at least 2 different"),
        ({"threads": -1}, "threads must not be negative"),
        ({"image_sise": 64}, "no option 'image_sise' .did you mean 'image_size'"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        build("tabletop", 1, options)


def test_bad_input_is_refused(tabletop):
    sim = tabletop(1)
    with pytest.raises(UserError, match="unknown task 'stak' .did you mean 'stack'"):
        sim.reset([0], ["stak"])
    sim.reset([0], ["stack"])
    with pytest.raises(UserError, match=r"actions must have shape .* \[1, C, 4\]"):
        sim.step(np.zeros((1, 2, 7)))
    sim.close()
    with pytest.raises(UserError, match="was closed"):
        sim.step(np.zeros((1, 2, 4)))


def test_two_colours_and_other_numbers_of_objects_do(tabletop):
    for objects in (2, 4):
        sim = tabletop(5, objects=objects, colours=["red", "blue"])
        assert sim.reset(range(5), list(TASKS)).images.shape == (5, 16, 16, 3)


def in_process(code, **environment):
    kept = {key: value for key, value in os.environ.items() if key not in ("MUJOCO_GL", "PYOPENGL_PLATFORM")}
    return subprocess.run(
        [sys.executable, "-c", code], env=kept | environment, capture_output=True, text=True, timeout=120
    )


BUILD = "from sims import build; sim = build('tabletop', 1, {'image_size': 16}); sim.reset([0], ['reach'])"


def test_a_missing_renderer_is_named_with_its_packages(tmp_path):
    done = in_process(BUILD, MUJOCO_GL="egl", __EGL_VENDOR_LIBRARY_DIRS=str(tmp_path))
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert (
        "UserError: MuJoCo cannot render off screen (egl: " in last and "libegl1 libegl-mesa0 libgl1-mesa-dri" in last
    )
    done = in_process(BUILD, MUJOCO_GL="glfw")
    assert "UserError: MUJOCO_GL=glfw cannot render off screen" in done.stderr


def test_the_backend_is_chosen_and_an_unclosed_simulator_leaves_quietly():
    done = in_process(BUILD + "; import os; print(os.environ['MUJOCO_GL'])")
    assert done.returncode == 0 and done.stdout.strip() in ("egl", "osmesa")
    assert done.stderr == ""


def test_a_missing_package_is_named_with_its_extra():
    done = in_process("import sys; sys.modules['mujoco'] = None\n" + BUILD)
    assert "UserError: simulator 'tabletop': " in done.stderr and "pip install -e '.[mujoco]'" in done.stderr


# Persistence


def memory():
    """Resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_200_resets_leak_neither_files_nor_memory(tabletop):
    sim = tabletop(2, threads=2)

    def resets(count):
        for seed in range(count):
            sim.reset([seed, seed + 1], ["pick_and_place", "reach"])
            sim.step(np.zeros((2, 1, 4)))

    resets(20)
    gc.collect()
    files, threads, before = len(os.listdir("/proc/self/fd")), threading.active_count(), memory()
    resets(200)
    gc.collect()
    # Something of an earlier test may be closed meanwhile, so there may be fewer.
    assert len(os.listdir("/proc/self/fd")) <= files and threading.active_count() <= threads
    assert memory() - before < 4 << 20


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_closing_gives_back_threads_files_and_memory():
    def once():
        with build("tabletop", 4, {"image_size": 64, "threads": 2}) as sim:
            sim.reset(range(4), ["reach"] * 4)

    once()
    once()
    gc.collect()
    files, threads, before = len(os.listdir("/proc/self/fd")), threading.active_count(), memory()
    for _ in range(6):
        once()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= files + 1 and threading.active_count() <= threads
    assert memory() - before < 16 << 20

"""OGBench's scene by value: what a seed gives, what is asked for and seen, when a task is solved, what experts do."""

import numpy as np
import pytest

from mmrl.errors import UserError
from mmrl.policies.vla.backbones import small
from mmrl.sims import build
from mmrl.tasks.manipulation import tiny_ogbench

pytest.importorskip("ogbench")

from mmrl.sims.ogbench import OGBenchRow  # noqa: E402

CUBE = ("proprio/effector", "privileged/block_0", "privileged/target_block")
TASKS = ["button", "drawer", "window", "cube"]


@pytest.fixture(scope="module")
def row():
    return OGBenchRow()


def test_experts_solve_every_task_and_a_seed_is_an_episode():
    with build("ogbench", len(TASKS), {"max_steps": 60}) as sim:
        assert (sim.simulator.action_dim, sim.simulator.state_dim, sim.simulator.image_shape) == (5, 43, (0, 0, 3))
        first = sim.reset([7] * 4, TASKS)
        drawn = np.random.get_state()[1].copy()
        solved, states, length = np.zeros(4, bool), [], np.zeros(4, int)
        while (active := sim.running).any():
            moved = sim.step(sim.expert(active))
            solved |= moved.success.any(1)
            length += active
            states.append(moved.observation.state.copy())
        assert solved.all() and (length > 3).all()
        assert np.array_equal(np.random.get_state()[1], drawn)  # experts draw from a state that is put back
        again = sim.reset([7] * 4, TASKS)
        assert np.array_equal(again.state, first.state) and again.instructions == first.instructions
        for state in states:
            if not (active := sim.running).any():
                break
            assert np.array_equal(sim.step(sim.expert(active)).observation.state, state)
        other = sim.reset([8] * 4, TASKS)
        assert not np.array_equal(other.state[:, :19], first.state[:, :19])


def test_training_begins_in_other_worlds_than_evaluation():
    """Seeds of training episodes begin at 2^32; OGBench reads 32 bits of a seed."""
    with build("ogbench", 2, {}) as sim:
        start = sim.reset([7, (1 << 32) + 7], ["cube"] * 2)
    assert not np.array_equal(start.state[0], start.state[1])


def test_what_is_asked_for_is_what_the_world_wants(row):
    """A button that is pressed changes its state; a drawer of -0.16 m and a window of 0.2 m are open."""
    said = set()
    for seed in range(12):
        for task in TASKS:
            row.start(task, seed)
            said.add(row.instruction())
            told = row.info
            if task == "button":
                place = told["privileged/target_button_top_pos"][1]  # y, to the right of who looks from the front
                assert row.instruction() == f"press the {'left' if place < 0 else 'right'} button"
                number = told["privileged/target_button"]
                assert told["privileged/target_button_state"] != told[f"privileged/button_{number}_state"]
            if task == "drawer":
                assert told["privileged/button_0_state"] == 1
                opens = abs(told["privileged/target_drawer_pos"][0] + 0.16) < 1e-6
                assert row.instruction() == f"{'open' if opens else 'close'} the drawer"
                assert opens == (told["privileged/drawer_pos"][0] >= -0.08)
            if task == "window":
                assert told["privileged/button_1_state"] == 1
                opens = abs(told["privileged/target_window_pos"][0] - 0.2) < 1e-6
                assert row.instruction() == f"{'open' if opens else 'close'} the window"
                assert opens == (told["privileged/window_pos"][0] <= 0.1)
            mark = row.state[-3:]
            wanted = 10 * (told["privileged/target_block_pos"] - [0.425, 0, 0]) if task == "cube" else np.zeros(3)
            np.testing.assert_allclose(mark, wanted)
    assert len(said) == 7 and {word for words in said for word in words.split()} == set(tiny_ogbench.WORDS)


def test_without_sides_words_are_the_same_and_the_state_says_which_way():
    """Of a state the 39th number is how far the window is open, in 15ths of a metre; at most 0.2 metres."""
    with build("ogbench", 4, {"sides": False}) as sim:
        seen = sim.reset([0, 1, 7, 7], ["window", "window", "drawer", "button"])
        said = [sim.simulator._rows[i].instruction() for i in range(4)]
    assert seen.instructions[:3] == ["move the window", "move the window", "move the drawer"]
    assert seen.instructions[3] == said[3] and said[3].startswith("press the ")
    assert said[:2] == ["close the window", "open the window"]
    assert [place <= 15 * 0.1 for place in seen.state[:2, 38]] == [False, True]


def test_success_ends_an_episode_and_time_cuts_it(row):
    with build("ogbench", 1, {"max_steps": 5}) as sim:
        sim.reset([3], ["button"])
        still = sim.step(np.zeros((1, 8, 5)))
        assert still.valid[0].tolist() == [True] * 5 + [False] * 3
        assert still.truncated[0].tolist() == [False] * 4 + [True] + [False] * 3 and not still.success.any()
        sim.reset([3], ["button"])
        assert sim.step(np.zeros((1, 4, 5))).valid.all()  # steps are counted anew
    row.start("button", 3)
    number = row.info["privileged/target_button"]
    wanted, solved = row.info["privileged/target_button_state"], False
    played = []
    while not solved:
        assert row.info[f"privileged/button_{number}_state"] != wanted
        played.append(row.expert_action())
        solved = row.act(played[-1])
    assert row.info[f"privileged/button_{number}_state"] == wanted
    with build("ogbench", 1, {}) as sim:
        sim.reset([3], ["button"])
        out = sim.step(np.array([[*played, *np.zeros((3, 5))]]))
        assert out.valid[0].sum() == len(played) and out.terminated[0].tolist().index(True) == len(played) - 1


def test_an_expert_serves_one_episode(row):
    row.start("button", 3)
    row.expert_action()
    row.start("drawer", 3)
    fresh = OGBenchRow()
    fresh.start("drawer", 3)
    assert np.array_equal(row.expert_action(), fresh.expert_action())


def test_images_are_seen_from_the_front():
    pytest.importorskip("mujoco")
    with build("ogbench", 1, {"observation": "rgb", "image_size": 48}) as sim:
        seen = sim.reset([3], ["button"])
        assert seen.images.shape == (1, 48, 48, 3) and seen.state.shape == (1, 19) and seen.images.std() > 10
        moved = sim.step(np.tile([0, 0, -1.0, 0, 0], (1, 6, 1)))
        assert (moved.observation.images != seen.images).mean() > 0.01 and moved.observation.images.std() > 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"observation": "rbg"}, "unknown observation 'rbg' .did you mean 'rgb'?"),
        ({"reward": "dense"}, "reward must be 'sparse' or 'shaped', not 'dense'"),
        ({"max_steps": 0}, "max_steps must be at least 1, not 0"),
        ({"image_size": 4}, "image_size must be at least 8"),
    ],
)
def test_options_that_mean_nothing_are_one_line(options, message):
    with pytest.raises(UserError, match=message):
        build("ogbench", 1, options)


def test_the_tiny_model_tells_every_word_from_the_others(tmp_path):
    tiny_ogbench.build(tmp_path, 0)
    backbone = small.load(tmp_path)
    image, state = [np.zeros((1, 0, 0, 3), np.uint8)], np.zeros((1, 43), np.float32)
    read = [backbone.prepare(image, [word], state)[0].words.tolist() for word in (*tiny_ogbench.WORDS, "nonsense")]
    assert len({tuple(ids) for ids in read}) == len(tiny_ogbench.WORDS) + 1


def test_the_shaped_reward_is_the_way_that_was_shortened_and_success():
    """What an expert earns adds up to the whole way, in decimetres: the state shows places in them."""
    with build("ogbench", 4, {"max_steps": 60, "reward": "shaped"}) as sim, build("ogbench", 4, {}) as plain:
        sim.reset([7] * 4, TASKS)
        plain.reset([7] * 4, TASKS)
        worlds = sim.simulator
        before = np.array([worlds._rows[i].path_length for i in range(4)])
        for i, task in enumerate(TASKS):
            told = worlds._rows[i].info
            if task == "cube":
                hand, cube, goal = (told[f"{name}_pos"] for name in CUBE)
                assert before[i] == pytest.approx(np.linalg.norm(hand - cube) + np.linalg.norm(cube - goal))
        earned, sparse = np.zeros(4), np.zeros(4)
        while (active := sim.running).any():
            wanted = sim.expert(active)
            earned += sim.step(wanted).reward.sum(1)
            sparse += plain.step(wanted).reward.sum(1)
        after = np.array([worlds._rows[i].path_length for i in range(4)])
        assert sparse.tolist() == [1.0] * 4
        np.testing.assert_allclose(earned, sparse + 10 * (before - after), atol=1e-5)
        assert (before - after > 0.03).all() and (after[1:] < before[1:] / 2).all()


def test_each_action_of_a_chunk_earns_what_it_alone_has_shortened():
    with build("ogbench", 1, {"reward": "shaped"}) as sim:
        sim.reset([3], ["button"])
        world = sim.simulator._rows[0]
        before = world.path_length
        moved = sim.step(np.tile([0.2, 0, -0.5, 0, 0], (1, 4, 1)))
        assert not moved.success.any() and abs(before - world.path_length) > 0.02
        assert moved.reward.sum() == pytest.approx(10 * (before - world.path_length), abs=1e-5)

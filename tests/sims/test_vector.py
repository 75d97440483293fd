import threading

import numpy as np
import pytest

from mmrl.errors import UserError
from mmrl.sims import VectorSim, build, run_episodes
from tests.sims.line_simulator import Line

LINE = "tests.sims.line_simulator:Line"


def line(count, end_of_episode="freeze", seeds=None, **options):
    sim = build(LINE, count, options, end_of_episode=end_of_episode, seed_stride=1000)
    sim.reset(range(count) if seeds is None else seeds, ["go"] * count)
    return sim


def same(amount, count, length=1):
    return np.full((count, length, 1), amount)


def test_a_chunk_is_executed_up_to_the_end_of_the_episode():
    sim = line(3, seeds=[0, 50, 90])
    step = sim.step(same(0.25, 3, 3))
    assert step.valid.tolist() == [[1, 1, 1], [1, 1, 0], [1, 0, 0]]
    assert step.terminated.tolist() == [[0, 0, 0], [0, 1, 0], [1, 0, 0]]
    assert step.success.tolist() == step.terminated.tolist() and not step.truncated.any()
    np.testing.assert_allclose(step.reward, [[0.25, 0.5, 0.75], [0.75, 1.0, 0], [1.15, 0, 0]], rtol=1e-6)
    np.testing.assert_allclose(step.observation.state[:, 0], [0.75, 1.0, 1.15], rtol=1e-6)
    assert step.ended.tolist() == [False, True, True] and sim.running.tolist() == [True, False, False]


def test_time_runs_out():
    step = line(1).step(same(0.0, 1, 8))
    assert step.truncated.tolist() == [[0, 0, 0, 0, 0, 1, 0, 0]] and step.valid.sum() == 6 and not step.terminated.any()


def test_frozen_and_inactive_rows_cost_nothing_and_do_not_change():
    sim = line(3, seeds=[0, 50, 90])
    sim.step(same(0.25, 3))
    before, sim.simulator.received = sim.observation(), []
    step = sim.step(same(0.25, 3), active=np.array([False, True, True]))  # row 2 has ended
    assert sim.simulator.received == [(1, 0.25)]
    assert step.valid.tolist() == [[False], [True], [False]]
    assert not step.ended[[0, 2]].any() and (step.reward[[0, 2]] == 0).all()
    for row in (0, 2):
        assert (step.observation.state[row] == before.state[row]).all()
        assert (step.observation.images[row] == before.images[row]).all()
    sim.step(same(0.25, 3), active=np.zeros(3, bool))
    assert len(sim.simulator.received) == 1


def test_auto_reset_starts_the_next_seed_and_keeps_the_final_observation():
    sim = line(2, "auto_reset", seeds=[7, 90])
    step = sim.step(same(0.25, 2, 2))
    assert sim.seeds == [7, 1090] and sim.running.all()
    np.testing.assert_allclose(step.final_observation.state[:, 0], [0.57, 1.15], rtol=1e-6)
    np.testing.assert_allclose(step.observation.state[:, 0], [0.57, 10.90], rtol=1e-6)
    assert step.observation.instructions == ["go from 0.07", "go from 10.90"]
    assert step.valid.tolist() == [[1, 1], [1, 0]]  # nothing of the new episode is executed in this chunk
    assert (step.observation.images[1] == 1090 % 256).all() and (step.final_observation.images[1] == 0).all()


def test_an_action_of_the_wrong_size_is_refused():
    sim = line(2)
    for shape in ((2, 1), (1, 3, 1), (2, 3, 2), (2, 0, 1)):
        with pytest.raises(UserError, match=r"actions must have shape .* \[2, C, 1\]"):
            sim.step(np.zeros(shape))
    assert sim.simulator.received == []
    with pytest.raises(UserError, match="active must be bool"):
        sim.step(same(0.0, 2), active=[1, 0])


def test_numbers_that_are_not_finite_are_counted_and_never_sent():
    sim = line(3, seeds=[0, 0, 99])
    sim.step(same(0.25, 3), active=np.array([False, False, True]))
    chunk = same(0.1, 3, 2)
    chunk[0, 0], chunk[1, 1], chunk[2] = np.nan, -np.inf, np.nan  # row 2 has ended: not executed, not counted
    sim.simulator.received = []
    sim.step(chunk)
    assert sim.simulator.received == [(0, 0.0), (0, 0.1), (1, 0.1), (1, 0.0)]
    assert sim.counters["nan_actions"] == 2


@pytest.mark.parametrize("mode", ["freeze", "auto_reset"])
def test_a_simulator_that_raises_loses_one_episode(mode):
    sim = line(3, mode)
    chunk = same(0.1, 3, 2)
    chunk[1, 1] = 9.0
    with pytest.warns(RuntimeWarning, match=r"environment 1 \(task go, seed 1\).*poisoned"):
        step = sim.step(chunk)
    assert step.dropped.tolist() == [False, True, False] and step.ended.tolist() == [False, True, False]
    assert step.valid.tolist() == [[1, 1], [0, 0], [1, 1]] and (step.reward[1] == 0).all()
    assert sim.counters["dropped_episodes"] == 1
    assert sim.running.tolist() == [True, mode == "auto_reset", True]
    after = sim.step(same(0.1, 3))
    assert not after.dropped.any() and after.valid[:, 0].tolist() == [True, mode == "auto_reset", True]


def test_an_episode_that_cannot_start_is_dropped_and_auto_reset_goes_on():
    sim = build(LINE, 2, {"unstartable": (5, 1005)}, end_of_episode="auto_reset", seed_stride=1000)
    with pytest.warns(RuntimeWarning, match="cannot start"):
        sim.reset([0, 5], ["go", "go"])
    assert sim.running.tolist() == [True, False] and sim.counters["dropped_episodes"] == 1
    with pytest.warns(RuntimeWarning, match="cannot start"):
        sim.step(same(0.1, 2))
    assert sim.step(same(0.1, 2)).valid[:, 0].tolist() == [True, False]
    assert sim.seeds[1] == 2005 and sim.running.all() and sim.counters["dropped_episodes"] == 2
    with pytest.warns(RuntimeWarning):
        sim.reset([5, 1005], ["go", "go"])
    assert not sim.running.any() and sim.counters["dropped_episodes"] == 4


def test_bad_resets_are_refused():
    sim = build(LINE, 2)
    with pytest.raises(UserError, match="reset.* must be called before"):
        sim.step(same(0.0, 2))
    with pytest.raises(UserError, match="unknown task 'sty' .did you mean 'stay'..; known: go, stay"):
        sim.reset([0, 1], ["go", "sty"])
    with pytest.raises(UserError, match="2 environments, but got 3 seeds and 2 tasks"):
        sim.reset([0, 1, 2], ["go", "go"])
    with pytest.raises(UserError, match="must not be negative, but one is -1"):
        sim.reset([0, -1], ["go", "go"])
    with pytest.raises(UserError, match="'freeze' or 'auto_reset', not 'thaw'"):
        build(LINE, 2, end_of_episode="thaw")


def test_names_and_options_are_checked():
    with pytest.raises(UserError, match="unknown simulator 'table_top' .did you mean 'tabletop'"):
        build("table_top", 1)
    with pytest.raises(UserError, match="no option 'posion' .did you mean 'poison'"):
        build(LINE, 1, {"posion": 1})
    with pytest.raises(UserError, match="has no 'Lime' .did you mean 'Line'"):
        build("tests.sims.line_simulator:Lime", 1)
    with pytest.raises(UserError, match="is its folder on PYTHONPATH"):
        build("no_such_package:Sim", 1)
    with pytest.raises(UserError, match="at least 1, not 0"):
        build(LINE, 0)


def test_observations_belong_to_the_caller():
    sim = line(1)
    first = sim.observation()
    first.state[:] = 77
    sim.step(same(0.25, 1))
    assert first.state[0] == 77 and sim.observation().state[0] == 0.25


def test_select_takes_indices_and_masks():
    seen = line(3, seeds=[1, 2, 3]).observation()
    assert seen.select([2, 0]).instructions == ["go from 0.03", "go from 0.01"]
    masked = seen.select(np.array([False, True, False]))
    assert masked.state.tolist() == [[np.float32(0.02)]] and (masked.images == 2).all() and len(masked) == 1


def test_run_episodes_plays_every_row_once():
    with build(LINE, 3) as sim:
        success, length = run_episodes(sim, [0, 50, 90], ["go"] * 3, lambda seen, active: sim.expert(active, length=2))
        assert success.tolist() == [True, True, True] and length.tolist() == [4, 2, 1]
    assert sim.simulator.closed
    assert sim.expert(length=2).tolist() == [[[0.0], [0.0]]] * 3  # nobody is running
    with pytest.raises(UserError, match="freeze"):
        run_episodes(line(1, "auto_reset"), [0], ["go"], lambda seen, active: same(0.0, 1))


def test_shares_in_turns_play_the_same_episodes():
    seeds, tasks = [0, 50, 90, 20, 95], ["go"] * 5

    def act(seen, active):
        assert threading.current_thread() is threading.main_thread()
        return np.where(seen.state[:, :1] < 0.6, 0.25, 0.1)[:, None].repeat(2, axis=1)

    whole = run_episodes(build(LINE, 5), seeds, tasks, act)
    with build(LINE, 5, workers=3, turns=2) as sim:
        assert [share.tolist() for share in sim.shares] == [[0, 1, 2, 3], [4]]
        success, length = run_episodes(sim, seeds, tasks, act)
    assert success.tolist() == whole[0].tolist() and length.tolist() == whole[1].tolist()
    assert len(set(length.tolist())) > 2
    with pytest.raises(UserError, match="turns must be 1 to the number of workers .1., not 2"):
        build(LINE, 5, workers=1, turns=2)


def test_a_share_moves_while_the_policy_acts_for_the_other():
    chosen, asked = threading.Event(), []

    class Waiting(Line):
        def step(self, rows, actions):
            if rows == [0]:
                assert chosen.wait(10), "the first share had to end its step before the policy was asked for the second"
                chosen.clear()
            return super().step(rows, actions)

    def act(seen, active):
        asked.append(np.flatnonzero(active).tolist())
        if active[1]:
            chosen.set()
        return same(0.2, 2)

    sim = VectorSim(Waiting(2), shares=[np.array([0]), np.array([1])])
    success, length = run_episodes(sim, [0, 0], ["go", "go"], act)
    assert success.all() and length.tolist() == [5, 5]
    assert asked == [[0], [1]] * 5

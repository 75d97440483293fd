import threading

import numpy as np
import pytest

from mmrl.errors import UserError
from mmrl.sims import VectorSim, build, play, run_episodes
from tests.sims.line_simulator import Line

LINE = "tests.sims.line_simulator:Line"


def line(count, seeds=None, **options):
    sim = build(LINE, count, options)
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


def test_a_row_restarts_while_others_go_on():
    sim = line(3, seeds=[7, 90, 95])
    step = sim.step(same(0.25, 3, 2))
    np.testing.assert_allclose(step.observation.state[:, 0], [0.57, 1.15, 1.20], rtol=1e-6)
    assert step.valid.tolist() == [[1, 1], [1, 0], [1, 0]] and sim.running.tolist() == [True, False, False]
    begun = sim.restart([1], [40], ["stay"])
    assert sim.seeds == [7, 40, 95] and sim.tasks == ["go", "stay", "go"]
    np.testing.assert_allclose(begun.state[:, 0], [0.57, 0.40, 1.20], rtol=1e-6)
    assert begun.instructions == ["go from 0.07", "go from 0.40", "go from 0.95"]
    assert (begun.images[1] == 40).all() and sim.running.tolist() == [True, True, False]
    step.observation.state[1] = 77  # what came before belongs to the caller
    after = sim.step(same(0.1, 3, 2))
    np.testing.assert_allclose(after.observation.state[:, 0], [0.77, 0.60, 1.20], rtol=1e-6)
    for rows, seeds, tasks, message in (
        ([0], [1], ["go"], "environment 0 cannot restart: its episode is running"),
        ([2], [1], ["sty"], "unknown task 'sty'"),
        ([2], [-1], ["go"], "must not be negative"),
    ):
        with pytest.raises(UserError, match=message):
            sim.restart(rows, seeds, tasks)
    assert sim.seeds == [7, 40, 95]
    fewer = build(LINE, 3)
    fewer.reset([1, 2], ["go"] * 2)
    with pytest.raises(UserError, match="environment 2 cannot restart: it never had an episode"):
        fewer.restart([2], [1], ["go"])


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


@pytest.mark.parametrize("again", [False, True])
def test_a_simulator_that_raises_loses_one_episode(again):
    sim = line(3)
    chunk = same(0.1, 3, 2)
    chunk[1, 1] = 9.0
    with pytest.warns(RuntimeWarning, match=r"environment 1 \(task go, seed 1\).*poisoned"):
        step = sim.step(chunk)
    assert step.dropped.tolist() == [False, True, False] and step.ended.tolist() == [False, True, False]
    assert step.valid.tolist() == [[1, 1], [0, 0], [1, 1]] and (step.reward[1] == 0).all()
    assert sim.counters["dropped_episodes"] == 1
    assert sim.running.tolist() == [True, False, True]
    if again:
        sim.restart([1], [4], ["go"])
    after = sim.step(same(0.1, 3))
    assert not after.dropped.any() and after.valid[:, 0].tolist() == [True, again, True]


def test_an_episode_that_cannot_start_is_dropped():
    sim = build(LINE, 2, {"unstartable": (5, 1005)})
    with pytest.warns(RuntimeWarning, match="cannot start"):
        sim.reset([0, 5], ["go", "go"])
    assert sim.running.tolist() == [True, False] and sim.counters["dropped_episodes"] == 1
    with pytest.warns(RuntimeWarning, match="cannot start"):
        sim.restart([1], [1005], ["go"])
    assert sim.step(same(0.1, 2)).valid[:, 0].tolist() == [True, False]
    sim.restart([1], [2005], ["go"])
    assert sim.running.all() and sim.counters["dropped_episodes"] == 2
    with pytest.warns(RuntimeWarning):
        sim.reset([5, 1005], ["go", "go"])
    assert not sim.running.any() and sim.counters["dropped_episodes"] == 4


def test_bad_resets_are_refused():
    sim = build(LINE, 2)
    with pytest.raises(UserError, match="reset.* must be called before"):
        sim.step(same(0.0, 2))
    with pytest.raises(UserError, match="unknown task 'sty' .did you mean 'stay'..; known: go, stay"):
        sim.reset([0, 1], ["go", "sty"])
    with pytest.raises(UserError, match="2 environments needs 1 to 2 seeds and as many tasks, not 3 seeds and 2 tasks"):
        sim.reset([0, 1, 2], ["go", "go"])
    with pytest.raises(UserError, match="must not be negative, but one is -1"):
        sim.reset([0, -1], ["go", "go"])


def test_names_and_options_are_checked():
    with pytest.raises(UserError, match="unknown simulator 'table_top' .did you mean 'tabletop'"):
        build("table_top", 1)
    with pytest.raises(UserError, match="no option 'posion' .did you mean 'poison'"):
        build(LINE, 1, {"posion": 1})
    with pytest.raises(UserError, match="has no 'Lime' .did you mean 'Line'"):
        build("tests.sims.line_simulator:Lime", 1)
    with pytest.raises(UserError, match="or add its folder to PYTHONPATH"):
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


@pytest.mark.parametrize("turns", [1, 2])
def test_rows_get_the_next_start_as_they_end(turns):
    """Seven starts in three rows: one of them cannot begin, one is lost on the way; what is seen of each is its own."""
    starts = [(0, "go"), (50, "go"), (90, "go"), (5, "go"), (95, "go"), (20, "stay"), (97, "go")]
    waiting, playing, began, moved = list(range(3, 7)), [0, 1, 2], [], {}

    def following(row):
        if not waiting:
            return None
        playing[row] = waiting.pop(0)
        return starts[playing[row]]

    def act(seen, rows):
        began.extend((playing[row], seen.instructions[row]) for row in rows if playing[row] not in dict(began))
        chunk = same(0.25, 3)
        chunk[[row for row in rows if playing[row] == 5]] = 9.0  # what the line cannot stand
        return [chunk], None

    def tell(rows, steps, _):
        for row in rows:
            moved.setdefault(playing[row], []).append(bool(steps[0].valid[row].any()))

    sim = build(LINE, 3, {"unstartable": (5,)}, workers=turns - 1 and 3, turns=turns)
    with sim, pytest.warns(RuntimeWarning):
        sim.reset(*zip(*starts[:3], strict=True))
        play(sim, act, tell, following=following)
    assert dict(began) == {n: f"go from {starts[n][0] / 100:.2f}" for n in (0, 1, 2, 4, 5, 6)}
    assert moved == {0: [True] * 4, 1: [True] * 2, 2: [True], 4: [True], 5: [False], 6: [True]}
    assert sim.counters["dropped_episodes"] == 2


def test_one_row_plays_all_starts_each_from_its_own_beginning(monkeypatch):
    """One that cannot begin is passed over; neither chunks nor actions of an episode count for the next."""
    monkeypatch.setattr("mmrl.sims.vector.simulator.MAX_ACTIONS", 5)
    waiting, lengths = [5, 10, 20], []

    def following(row):
        lengths.append(0)
        return (waiting.pop(0), "go") if waiting else None

    def act(seen, rows):
        return [same(0.25, 1)], None

    def tell(rows, steps, _):
        lengths[-1] += 1

    lengths.append(0)
    with build(LINE, 1, {"unstartable": (5,)}) as sim, pytest.warns(RuntimeWarning, match="cannot start"):
        sim.reset([0], ["go"])
        play(sim, act, tell, max_chunks=4, following=following)
    assert lengths == [4, 0, 4, 4, 0]  # the second could not begin, and after the fourth there was none
    assert sim.counters["dropped_episodes"] == 1


def test_a_row_that_could_not_start_gets_the_next_start():
    """Of a reset that loses all of its rows, too."""
    waiting, began = [(20, "go"), (30, "go")], []

    def following(row):
        return waiting.pop(0) if waiting else None

    def act(seen, rows):
        began.extend((int(row), seen.instructions[row]) for row in rows)
        return [same(0.9, 3)], None

    with build(LINE, 3, {"unstartable": (5, 6)}) as sim:
        sim.reset([1, 2], ["go", "go"])
        with pytest.warns(RuntimeWarning, match="cannot start"):
            sim.reset([5, 6], ["go", "go"])
        play(sim, act, lambda rows, steps, _: None, following=following)
    assert began == [(0, "go from 0.20"), (1, "go from 0.30")]


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
    with pytest.raises(UserError, match="turns must be from 1 to 1 with workers=1, not 2"):
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

import logging
import threading
import time
import warnings

import numpy as np
import pytest

from mmrl.errors import UserError
from mmrl.sims import Transition, build, play
from mmrl.sims.vector import simulator
from mmrl.sims.vector.checks import mark_nonfinite
from mmrl.sims.vector.watch import CallWatch
from tests.sims.hostile import SHAPES

HOSTILE = "tests.sims.hostile:Hostile"


def hostile(count=3, workers=0, **options):
    return build(HOSTILE, count, options, workers=workers)


def begun(count=3, workers=0, **options):
    sim = hostile(count, workers, **options)
    sim.reset(range(count), ["go"] * count)
    return sim


def chunk(count=3, amount=0.1):
    return np.full((count, 2, 1), amount)


@pytest.mark.parametrize("kind", SHAPES)
def test_the_first_step_that_does_not_fit_is_refused_by_name(kind):
    with pytest.raises(UserError, match=f"simulator '{HOSTILE}': step must give") as caught:
        begun(kind=kind).step(chunk())
    assert "\n" not in str(caught.value)


RESETS = ["float images", "image of one row", "channels first", "state of one", "objects", "no errors", "nothing"]


@pytest.mark.parametrize("kind", RESETS)
def test_the_first_observation_that_does_not_fit_is_refused_by_name(kind):
    with pytest.raises(UserError, match=f"simulator '{HOSTILE}': reset must give"):
        begun(kind=kind, at="reset")


def test_what_is_wrong_is_said_in_full():
    with pytest.raises(UserError, match=r"reward as an array of numbers \[3, 2\], not float32 \[1, 2\]"):
        begun(kind="short reward").step(chunk())
    with pytest.raises(UserError, match=r"images as an array of uint8 \[3, 2, 2, 3\], not float64 \[3, 2, 2, 3\]"):
        begun(kind="float images").step(chunk())


def test_a_later_step_that_does_not_fit_costs_its_episodes():
    sim = begun(kind="float images", after=1)
    assert not sim.step(chunk()).dropped.any()
    with pytest.warns(RuntimeWarning, match="lost its episode: SimulatorFault: step must give images"):
        assert sim.step(chunk()).dropped.all()
    assert sim.counters["dropped_episodes"] == 3 and not sim.running.any()


def test_behind_workers_nothing_broadcasts_either():
    with (
        hostile(3, workers=1, kind="short reward") as sim,
        pytest.raises(UserError, match=r"step must give reward as an array of numbers \[3, 2\], not float32 \[1, 2\]"),
    ):
        sim.reset(range(3), ["go"] * 3)
        sim.step(chunk())


@pytest.mark.parametrize("kind", ["raise", "exit"])
@pytest.mark.parametrize("after", [0, 1])
def test_one_in_this_process_that_raises_costs_its_episodes(kind, after):
    sim = begun(kind=kind, after=after)
    for _ in range(after):
        assert not sim.step(chunk()).dropped.any()
    with pytest.warns(RuntimeWarning, match=r"of simulator .* lost its episode: .*(all of it is broken|SystemExit: 3)"):
        step = sim.step(chunk())
    assert step.dropped.all() and not step.valid.any() and (step.reward == 0).all()
    assert sim.counters["dropped_episodes"] == 3
    sim.simulator.kind = ""
    assert sim.reset(range(3), ["go"] * 3) and sim.step(chunk()).valid.all()


def test_where_nothing_ever_starts_the_run_ends_and_later_it_costs_episodes():
    with (
        pytest.warns(RuntimeWarning),
        pytest.raises(UserError, match="no environment could be reset; the first error: ArithmeticError: all of it"),
    ):
        begun(kind="raise", at="reset")
    sim = begun(kind="raise", at="reset", after=1)
    with pytest.warns(RuntimeWarning, match="all of it is broken"):
        sim.reset(range(3), ["go"] * 3)
    assert not sim.running.any() and sim.counters["dropped_episodes"] == 3


@pytest.mark.parametrize(("kind", "at"), [("nan state", "step"), ("infinite reward", "step"), ("nan state", "reset")])
def test_numbers_that_are_none_cost_the_episode_where_they_come_in(kind, at):
    sim = hostile(kind=kind, at=at, only_row=1)
    if at == "step":
        sim.reset(range(3), ["go"] * 3)
    with pytest.warns(RuntimeWarning, match=f"environment 1 .* its {kind.split()[-1]} is not finite") as told:
        if at == "reset":
            sim.reset(range(3), ["go"] * 3)
        else:
            step = sim.step(chunk())
            assert step.dropped.tolist() == [False, True, False] and np.isfinite(step.observation.state).all()
            assert np.isfinite(step.reward).all()
    assert len(told) == 1 and sim.running.tolist() == [True, False, True] and sim.counters["dropped_episodes"] == 1


def test_a_reward_where_nothing_was_executed_may_be_anything():
    moved = Transition.empty(2, 3, (2, 2, 3), 1)
    moved.valid[:] = [[True, True, False], [True, True, True]]
    moved.reward[:, 2] = np.nan
    mark_nonfinite(moved)
    assert moved.errors[0] is None and "reward is not finite" in str(moved.errors[1])


@pytest.mark.parametrize("workers", [0, 1])
def test_an_episode_that_never_moves_is_dropped_after_two_chunks(workers):
    with begun(workers=workers, kind="stands still", only_row=1) as sim:
        first = sim.step(chunk())
        assert not first.dropped.any() and first.valid.any(1).tolist() == [True, False, True]
        with pytest.warns(RuntimeWarning, match="environment 1 .* executed no action in 2 chunks in a row"):
            second = sim.step(chunk())
        assert second.dropped.tolist() == [False, True, False]


def test_one_idle_chunk_between_others_is_allowed():
    sim = begun(kind="stands still", only_row=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for after in (0, 99, 0, 99):
            sim.simulator.after = after
            sim.step(chunk(amount=0.0))
    assert sim.counters["dropped_episodes"] == 0


def test_an_episode_that_never_ends_is_dropped():
    asked = []

    def act(observation, rows):
        asked.append(rows.tolist())
        return [chunk()], None

    told = []
    sim = begun(kind="never ends", only_row=1)
    with pytest.warns(
        RuntimeWarning, match="environment 1 .* has not ended after 7 chunks of actions; raise action.horizon"
    ):
        play(sim, act, lambda rows, steps, _: told.append(steps[-1].dropped.copy()), max_chunks=7)
    assert len(asked) == 7 and [bool(d[1]) for d in told] == [False] * 6 + [True] and not told[-1][[0, 2]].any()
    assert sim.counters["dropped_episodes"] == 1 and not sim.running.any()


def test_one_that_ends_with_its_last_look_is_kept():
    sim = begun()
    play(sim, lambda observation, rows: ([chunk()], None), lambda *_: None, max_chunks=3)  # six steps
    assert sim.counters["dropped_episodes"] == 0


def test_without_a_limit_of_looks_there_is_one_of_actions(monkeypatch):
    monkeypatch.setattr(simulator, "MAX_ACTIONS", 9)
    sim = begun(kind="never ends", only_row=1)
    with pytest.warns(RuntimeWarning, match="environment 1 .* has not ended after 10 actions"):
        play(sim, lambda observation, rows: ([chunk()], None), lambda *_: None)
    sim.reset(range(3), ["go"] * 3)
    assert not sim.step(chunk()).dropped.any()  # it counts anew


def test_one_in_this_process_that_takes_very_long_is_told_of(caplog):
    sim = build(HOSTILE, 3, {"kind": "slow", "times": 1}, deadline_s=0.15)
    sim.reset(range(3), ["go"] * 3)
    with caplog.at_level(logging.WARNING, "mmrl"):
        for _ in range(2):
            sim.step(chunk())
    (message,) = caplog.messages
    assert message.startswith(f"simulator {HOSTILE}: a step takes longer than 0.15 s") and "task.workers" in message


def test_one_thread_watches_over_all_calls_and_ends_after_them(caplog, monkeypatch):
    begun_threads = []
    usual = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda thread: (begun_threads.append(thread), usual(thread)))
    watch = CallWatch("it", 0.2)
    with caplog.at_level(logging.WARNING, "mmrl"):
        for _ in range(50):
            with watch.over("step"):
                pass
        assert len(begun_threads) == 1
        began = time.monotonic()
        with watch.over("reset"), watch.over("step"):
            while len(caplog.messages) < 2 and time.monotonic() < began + 5:
                time.sleep(0.01)
            told = time.monotonic() - began
            time.sleep(0.3)  # each is told of once
    assert sorted(m.split()[3] for m in caplog.messages) == ["reset", "step"] and told >= 0.2
    for thread in begun_threads:
        thread.join(5)
    assert not any(thread.is_alive() for thread in begun_threads) and 1 <= len(begun_threads) <= 2
    with watch.over("step"):  # another thread looks after what comes later
        time.sleep(0.3)
    assert len(caplog.messages) == 3


def test_the_thread_ends_when_its_simulator_closes():
    watch, before = CallWatch("it", 1000.0), threading.active_count()
    with watch.over("step"):
        assert threading.active_count() == before + 1
    watch.close()
    assert threading.active_count() == before


def test_experts_and_instructions_are_looked_at():
    with pytest.raises(UserError, match=r"expert must give numbers \[3, 2, 1\], not float32 \[1, 2, 1\]"):
        begun(kind="short expert").expert(length=2)
    with pytest.raises(UserError, match="instruction must give text, not NoneType"):
        begun(kind="no words")
    sim = begun(kind="expert")
    with pytest.warns(RuntimeWarning, match="its expert failed: ArithmeticError: no plan"):
        assert (sim.expert(length=2) == 0).all()
    assert not sim.running.any()


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({"action_dim": 0}, "action_dim must be an integer of at least 1, not 0"),
        ({"state_dim": 1.5}, "state_dim must be"),
        ({"image_shape": (3, 4, 4)}, r"image_shape must be \(height, width, 3\)"),
        ({"image_shape": None}, "NoneType"),
        ({"tasks": ()}, "tasks must be one or more names"),
    ],
)
def test_facts_that_cannot_be(facts, says):
    with pytest.raises(UserError, match=f"simulator '{HOSTILE}': .*{says}"):
        hostile(facts=facts)


def test_one_that_cannot_be_made():
    with pytest.raises(UserError, match=r"cannot be made: OSError: out of arms \(trouble.py:"):
        build("tests.sims.trouble:Trouble", 1, {"refuse_start": True})

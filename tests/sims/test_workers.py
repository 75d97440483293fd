import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import mmrl.sims.vector.workers
from mmrl.errors import UserError
from mmrl.sims import build, run_episodes
from tests.helpers.processes import running
from tests.sims.alike import assert_alike
from tests.sims.trouble import DIE, HANG, RAISE

LINE, TROUBLE = "tests.sims.line_simulator:Line", "tests.sims.trouble:Trouble"
RATHER_SLOW = 8.0  # seconds; a worker starts within it on a busy machine


@pytest.fixture
def behind():
    opened = []

    def make(name, count, workers, options=None, **arguments):
        opened.append(build(name, count, options, workers=workers, **arguments))
        return opened[-1]

    yield make
    for sim in opened:
        sim.close()


def chunk(count, amount=0.1, **others):
    actions = np.full((count, 2, 1), amount)
    for row, value in others.items():
        actions[int(row.removeprefix("row")), 1] = value
    return actions


def test_workers_change_nothing(behind):
    plain, split = build(LINE, 5), behind(LINE, 5, 2)
    assert len(split.simulator._workers) == 2 and split.simulator.tasks == ("go", "stay")
    assert_alike(plain, split)


def test_the_tabletop_plays_the_same_episodes_in_a_process_of_its_own(behind):
    pytest.importorskip("mujoco")
    from mmrl.sims.mujoco.gl import choose_backend

    try:
        choose_backend()
    except UserError as error:
        pytest.skip(str(error))
    options, seeds, tasks = {"image_size": 16, "threads": 1}, [4, 4, 9], ["lift", "lift", "reach"]
    seen = []
    for sim in (build("tabletop", 3, options), behind("tabletop", 3, 2, options)):
        with sim:
            first = sim.reset(seeds, tasks)
            assert np.array_equal(first.images[0], first.images[1]) and first.images.std() > 10
            steps = [sim.step(sim.expert(length=4)) for _ in range(3)]
            seen.append([first.images, *(step.observation.images for step in steps), steps[-1].observation.state])
            assert first.instructions[2].startswith("reach")
    assert all(np.array_equal(a, b) for a, b in zip(*seen, strict=True))


@pytest.mark.parametrize(
    ("trouble", "says"),
    [(RAISE, "ArithmeticError: all of it is broken"), (HANG, r"no answer in 2 s"), (DIE, "its process ended with 3")],
)
def test_trouble_costs_the_episodes_of_one_worker(behind, trouble, says):
    sim = behind(TROUBLE, 4, 2, deadline_s=2)
    sim.reset(range(4), ["go"] * 4)
    healthy, sick = sim.simulator.pids
    with pytest.warns(RuntimeWarning, match=says):
        step = sim.step(chunk(4, row2=trouble))
    assert step.dropped.tolist() == [False, False, True, True]
    assert step.valid.tolist() == [[1, 1], [1, 1], [0, 0], [0, 0]]
    np.testing.assert_allclose(step.observation.state[:2, 0], [0.2, 0.21], rtol=1e-6)
    assert sim.counters["dropped_episodes"] == 2 and sim.simulator.restarts == 1
    assert not running(sick) and sim.simulator.pids[0] == healthy and sim.simulator.pids[1] != sick
    after = sim.step(chunk(4))
    assert after.valid.any(1).tolist() == [True, True, False, False]
    sim.reset(range(10, 14), ["go"] * 4)
    assert not sim.step(chunk(4)).dropped.any() and sim.counters["dropped_episodes"] == 2
    assert sim.counters["restarts"] == 1, "each is told of once"


def test_a_worker_killed_between_steps_costs_its_episode_only(behind):
    sim = behind(LINE, 2, 2)
    sim.reset([1, 2], ["go", "go"])
    os.kill(sim.simulator.pids[1], signal.SIGKILL)
    sim.simulator._workers[1].child.process.wait()
    with pytest.warns(RuntimeWarning, match=r"environment 1 \(task go, seed 2\).*ended with -9"):
        step = sim.step(chunk(2))
    assert step.dropped.tolist() == [False, True] and sim.running.tolist() == [True, False]
    again = sim.restart([1], [1002], ["go"])
    np.testing.assert_allclose(again.state[:, 0], [0.21, 10.02], rtol=1e-6)
    assert again.instructions == ["go from 0.01", "go from 10.02"]
    os.kill(sim.simulator.pids[0], signal.SIGKILL)
    sim.simulator._workers[0].child.process.wait()
    sim.reset([3, 4], ["go", "go"])  # nothing was being played that matters, so nothing is lost
    assert sim.counters["dropped_episodes"] == 1 and sim.simulator.restarts == 2


def test_rows_left_inactive_while_their_worker_dies_are_lost_too(behind):
    sim = behind(TROUBLE, 2, 1, deadline_s=60)
    sim.reset([1, 2], ["go", "go"])
    with pytest.warns(RuntimeWarning, match="environment 0"):
        first = sim.step(chunk(2, row0=DIE), active=np.array([True, False]))
    assert first.dropped.tolist() == [True, False] and sim.running.tolist() == [False, True]
    with pytest.warns(RuntimeWarning, match="environment 1.*worker was replaced: its process ended with 3"):
        second = sim.step(chunk(2))
    assert second.dropped.tolist() == [False, True] and sim.simulator.restarts == 1


def test_a_stopped_process_is_found_before_its_deadline(behind, monkeypatch):
    monkeypatch.setattr(mmrl.sims.vector.workers, "SILENT_S", 2.5)
    sim = behind(TROUBLE, 1, 1, deadline_s=60)
    sim.reset([1], ["go"])
    os.kill(sim.simulator.pids[0], signal.SIGSTOP)
    began = time.monotonic()
    with pytest.warns(RuntimeWarning, match="no heartbeat in 2.5 s"):
        assert sim.step(chunk(1)).dropped.all()
    assert time.monotonic() - began < 50


@pytest.mark.slow
def test_a_slow_chunk_is_not_taken_for_a_stopped_process(behind, monkeypatch):
    monkeypatch.setattr(mmrl.sims.vector.workers, "SILENT_S", 4)
    sim = behind(TROUBLE, 1, 1, deadline_s=6)
    sim.reset([1], ["go"])
    with pytest.warns(RuntimeWarning, match="no answer in 6 s"):
        sim.step(chunk(1, row0=HANG))


def test_a_lost_expert_is_reported_by_the_next_step(behind):
    sim = behind(TROUBLE, 2, 2)
    sim.reset([1, 2], ["go", "go"])
    os.kill(sim.simulator.pids[0], signal.SIGKILL)
    sim.simulator._workers[0].child.process.wait()
    assert sim.expert(length=2).tolist() == [[[0.0], [0.0]], [[0.25], [0.25]]]
    with pytest.warns(RuntimeWarning, match="ended with -9"):
        assert sim.step(chunk(2)).dropped.tolist() == [True, False]


def test_errors_of_single_rows_do_not_replace_the_worker(behind):
    sim = behind(LINE, 3, 1, {"unstartable": [1]})
    with pytest.warns(RuntimeWarning, match="environment 1.*RuntimeError: cannot start"):
        sim.reset([0, 1, 2], ["go"] * 3)
    with pytest.warns(RuntimeWarning, match="environment 2.*poisoned"):
        step = sim.step(chunk(3, row2=9.0))
    assert step.dropped.tolist() == [False, False, True] and sim.simulator.restarts == 0


def test_what_is_asked_wrongly_is_refused_in_one_line(behind):
    for count, workers in ((2, 3), (2, -1)):
        with pytest.raises(UserError, match=f"workers must be from 1 to 2, .*, not {workers}"):
            build(LINE, count, workers=workers)
    with pytest.raises(UserError, match="no option 'posion' .did you mean 'poison'"):
        build(LINE, 1, {"posion": 1}, workers=1)
    with pytest.raises(UserError, match="its options must be valid JSON"):
        build("gymnasium", 1, {"env": print}, workers=1)
    with pytest.raises(UserError, match="deadline_s must be positive"):
        build(LINE, 1, workers=1, deadline_s=0)
    with pytest.raises(UserError, match="is the interpreter of workers"):
        build(LINE, 1, python=sys.executable)
    with pytest.raises(UserError, match="cannot be made: OSError: out of arms"):
        build(TROUBLE, 1, {"refuse_start": True}, workers=1)
    sim = behind(LINE, 1, 1)
    sim.close()
    with pytest.raises(UserError, match="were closed"):
        sim.reset([0], ["go"])


def test_another_interpreter_may_run_the_workers(behind, tmp_path):
    other = tmp_path / "python"
    other.write_text(f'#!/bin/sh\nexport OTHER=yes\nexec {sys.executable} "$@"\n')
    other.chmod(0o755)
    sim = behind(LINE, 2, 1, python=str(other))
    assert sim.reset([1, 2], ["go", "go"]).instructions[1] == "go from 0.02"
    environment = Path(f"/proc/{sim.simulator.pids[0]}/environ").read_bytes().split(b"\0")
    assert b"PYTHONPATH=" in environment  # none of this interpreter's packages
    with pytest.raises(UserError, match="no Python interpreter at /nowhere/python"):
        build(LINE, 1, workers=1, python="/nowhere/python")


BLOCKED = ("torch", "pydantic", "packaging", "omegaconf", "transformers", "deepspeed", "rich", "psutil", "requests")


def test_a_simulator_needs_none_of_the_packages_of_training():
    """In an environment of its own there are its packages alone, beside this one without what it depends on."""
    code = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({BLOCKED!r}))\n"  # an import of None fails as of one that is not there
        "import mmrl.sims.vector.service\n"
        "from mmrl import sims\n"
        f"with sims.build({LINE!r}, 2) as sim:\n"
        "    sim.reset([1, 2], ['go', 'go'])\n"
        "    print(sim.observation().instructions[1])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "go from 0.02"


def test_nobody_is_left_behind(behind):
    sim = behind(LINE, 2, 2)
    before = sim.simulator.pids
    sim.close()
    assert not any(running(pid) for pid in before)
    script = """
import sys, numpy as np
from mmrl.sims import build
from tests.sims.trouble import HANG
sim = build("tests.sims.trouble:Trouble", 2, workers=2)
sim.reset([1, 2], ["go", "go"])
print(*sim.simulator.pids, flush=True)
actions = np.full((2, 1, 1), 0.1)
actions[1] = HANG
sim.step(actions)
"""
    trainer = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    orphans = [int(word) for word in trainer.stdout.readline().split()]
    assert len(orphans) == 2 and all(running(pid) for pid in orphans)
    trainer.kill()
    trainer.wait()
    end = time.monotonic() + RATHER_SLOW
    while any(running(pid) for pid in orphans) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(running(pid) for pid in orphans)  # neither the idle one nor the one that hangs


def test_a_thousand_resets_leak_neither_memory_nor_file_handles(behind):
    sim = behind(LINE, 2, 2)

    def handles():
        return [len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in (os.getpid(), *sim.simulator.pids)]

    def resident():
        return [
            int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 for pid in (os.getpid(), *sim.simulator.pids)
        ]

    def play(rounds):
        for k in range(rounds):
            sim.reset([k, k], ["go", "go"])
            sim.step(chunk(2))

    play(200)
    before = handles(), resident()
    play(1000)
    assert handles() == before[0]
    assert max(np.subtract(resident(), before[1])) < 2**20
    success, _ = run_episodes(sim, [0, 50], ["go", "go"], lambda seen, active: sim.expert(active, length=2))
    assert success.all()


def test_replaced_workers_leave_no_handles_behind(behind):
    sim = behind(LINE, 1, 1)
    sim.reset([1], ["go"])
    before = len(list(Path("/proc/self/fd").iterdir()))
    for k in range(5):
        os.kill(sim.simulator.pids[0], signal.SIGKILL)
        sim.simulator._workers[0].child.process.wait()
        sim.reset([k], ["go"])
    assert sim.simulator.restarts == 5
    assert len(list(Path("/proc/self/fd").iterdir())) == before

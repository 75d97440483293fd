"""Ranks that hang, stop or are killed are named by those that wait for them."""

import json
import os
import signal
import subprocess
import time
from dataclasses import asdict, replace

import pytest

from mmrl.engine import heartbeat
from mmrl.engine.heartbeat import RankState, missing_rank
from mmrl.training.metrics import stragglers
from tests.whole_runs.parts import TINY, command, errors_told, metrics, start, wait

SLOW = "task.type=tests.whole_runs.parts:"


def launch(folder, *more):
    settings = [f"run_dir={folder}", "steps=100000", "checkpoint.every=0", "engine.timeout=6", *more]
    return start(command, "train", str(TINY), *settings, log=folder.with_suffix(".log"), ranks=2)


def trained(folder, processes, steps):
    end = time.monotonic() + 60
    while not (folder / "metrics.jsonl").exists() or len(metrics(folder)) < steps:
        assert processes[0].is_alive() and time.monotonic() < end, folder.with_suffix(".log").read_text()[-3000:]
        time.sleep(0.01)


def ended(process, log, seconds=40):
    process.join(seconds)
    assert not process.is_alive(), log.read_text()[-3000:]
    return process.exitcode


def test_a_rank_that_hangs_in_its_own_code_is_named_with_its_phase(tmp_path):
    run, log = tmp_path / "run", tmp_path / "run.log"
    processes = launch(run, SLOW + "SleepsOnRankOne")
    assert ended(processes[0], log) == 2
    assert processes[1].is_alive()  # it is for the launcher to end it
    processes[1].kill()
    wait(processes, log)
    named = f"rank 1 (process {processes[1].pid} on {os.uname().nodename}, in phase rollout)"
    assert f"waiting for {named}: it has made no progress for" in log.read_text()
    assert f"mmrl: {named} has made no progress for" in log.read_text() and "engine.timeout=6" in log.read_text()
    assert [row["step"] for row in metrics(run)] == [1]


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_rank_that_is_stopped_is_named(tmp_path, rank):
    run, log = tmp_path / "run", tmp_path / "run.log"
    processes = launch(run)
    trained(run, processes, 2)
    os.kill(processes[rank].pid, signal.SIGSTOP)
    assert ended(processes[1 - rank], log) == 2
    processes[rank].kill()
    wait(processes, log)
    assert f"mmrl: rank {rank} (process {processes[rank].pid} on" in log.read_text()
    assert "has sent no heartbeat for" in log.read_text()


@pytest.mark.parametrize("timeout", [6, 1800])
def test_a_rank_that_is_killed_is_named_at_once(tmp_path, timeout):
    """Also in a run that has just begun, whose ranks look at each other every 15 s."""
    run, log = tmp_path / "run", tmp_path / "run.log"
    processes = launch(run, f"engine.timeout={timeout}")
    trained(run, processes, 2)
    processes[1].kill()
    assert ended(processes[0], log, 5) == 2
    (line,) = errors_told(log.read_text())
    assert f"rank 1 (process {processes[1].pid} on" in line and "has ended" in line


@pytest.mark.slow
def test_a_rank_that_waits_long_but_not_too_long_goes_on(tmp_path):
    run, log = tmp_path / "run", tmp_path / "run.log"
    processes = launch(run)
    trained(run, processes, 2)
    os.kill(processes[1].pid, signal.SIGSTOP)
    time.sleep(3)
    os.kill(processes[1].pid, signal.SIGCONT)
    trained(run, processes, len(metrics(run)) + 2)
    os.kill(processes[0].pid, signal.SIGTERM)
    assert wait(processes, log) == [143, 143]
    assert "waiting for rank 1" in log.read_text() and "Traceback" not in log.read_text()
    assert not (run / "ranks").exists()


def test_the_slowest_rank_is_told(tmp_path):
    run, log = tmp_path / "run", tmp_path / "run.log"
    settings = ["train", str(TINY), f"run_dir={run}", "steps=2", SLOW + "SlowOnRankOne"]
    assert wait(start(command, *settings, log=log, ranks=2), log) == [0, 0], log.read_text()[-3000:]
    for row in [row for row in metrics(run) if "loss" in row]:
        assert row["time/rollout_slowest"] == 1
        assert row["time/rollout_max"] >= 0.8  # 8 samples, marked twice, of 0.05 s each


def test_stragglers_by_hand():
    found = stragglers([{"rollout": 1.0}, {"rollout": 5.0}, {"rollout": 2.0}])
    assert found == {"time/rollout_max": 5.0, "time/rollout_median": 2.0, "time/rollout_slowest": 1.0}
    assert stragglers([{"rollout": 1.0}]) == {}


def life(rank, marks):
    return RankState(rank, "host", 1, "update", marks)


@pytest.mark.parametrize(
    ("others", "named"),
    [
        ([(9, 100, 100)], (1, "has made no progress", 0)),  # behind, lives
        ([(10, 100, 60)], None),  # as far as this one: nobody can be named
        ([(11, 100, 60)], None),  # further: this one is missing itself
        ([(10, 50, 60)], (1, "has sent no heartbeat", 50)),
        ([(9, 100, 70), (9, 100, 40)], (2, "has made no progress", 60)),  # he who has stood still longest
        ([(9, 100, 40), (9, 50, 70)], (2, "has sent no heartbeat", 50)),  # the silent one before the slow one
    ],
)
def test_who_is_missing(others, named):
    """others: marks, and the times of the last beat and of the last mark; now is 100."""
    seen = {0: (life(0, 10), 100.0, 50.0)}
    seen |= {rank: (life(rank, m), float(beat), float(mark)) for rank, (m, beat, mark) in enumerate(others, 1)}
    found = missing_rank(seen, 0, 100.0, 10.0)
    assert (None if found is None else (found[0].rank, *found[1:])) == named


def test_a_rank_that_does_not_come_up_is_named(tmp_path):
    """Rank 1 is killed at once, and there is no launcher that would end the one that waits for it; what an earlier
    start left of it is not taken for it."""
    run, log = tmp_path / "run", tmp_path / "run.log"
    (run / "ranks").mkdir(parents=True)
    left = RankState(1, os.uname().nodename, pid_that_has_ended(), written=time.time())
    (run / "ranks" / "rank-1.json").write_text(json.dumps(asdict(left)))
    processes = launch(run, "engine.timeout=4")
    processes[1].kill()
    assert ended(processes[0], log) == 2
    (line,) = errors_told(log.read_text())
    assert line.startswith("mmrl: rank 1 did not start within 4 s: no file in ")
    time.sleep(1)  # a watchdog would speak after the end
    assert f"process {processes[0].pid} (rank 0) was ended" not in log.read_text()  # it has told why


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_rank_that_is_killed_before_ranks_meet_is_named_at_once(tmp_path, rank):
    """While the other one waits for it, which torch would do for as long as engine.timeout."""
    run, log = tmp_path / "run", tmp_path / "run.log"
    processes = launch(run, "engine.timeout=1800", SLOW + "NeverThere", f"task.rank={rank}")
    end = time.monotonic() + 60
    while len(list(run.glob("ranks/rank-*.json"))) < 2:
        assert time.monotonic() < end, log.read_text()[-3000:]
        time.sleep(0.01)
    time.sleep(2)  # until the other one waits
    processes[rank].kill()
    assert ended(processes[1 - rank], log, 30) == 2
    (line,) = errors_told(log.read_text())
    assert f"rank {rank} (process {processes[rank].pid} on" in line and "has ended" in line


def test_a_rank_that_came_up_since_the_last_look_is_looked_for(tmp_path, monkeypatch):
    """Ranks look at each other every 15 s once they have met."""
    monkeypatch.setattr(heartbeat, "EXIT_S", 0.2)  # less than until the next look
    own = heartbeat.Heartbeat(tmp_path, 0, 2, 1800.0)
    try:
        with own.meeting():
            pass
        other = RankState(1, os.uname().nodename, pid_that_has_ended(), written=time.time())
        (tmp_path / "ranks" / "rank-1.json").write_text(json.dumps(asdict(other)))
        assert own.dead() == other
        (tmp_path / "ranks" / "rank-1.json").unlink()
    finally:
        own.close()
    assert not (tmp_path / "ranks").exists()


def test_a_rank_in_a_container_of_the_same_name_is_not_taken_for_one_that_ended(tmp_path):
    """Its process has a number that is not in use here, and it may run all the same."""
    (tmp_path / "ranks").mkdir()
    path = tmp_path / "ranks" / "rank-1.json"
    elsewhere = RankState(1, os.uname().nodename, pid_that_has_ended(), written=time.time(), namespace="elsewhere")
    path.write_text(json.dumps(asdict(elsewhere)))
    own = heartbeat.Heartbeat(tmp_path, 0, 2, 1800.0)
    try:
        assert own.dead() is None
        path.write_text(json.dumps(asdict(replace(elsewhere, namespace=own.state.namespace))))
        assert own.dead() == replace(elsewhere, namespace=own.state.namespace)
        path.unlink()
    finally:
        own.close()


def pid_that_has_ended() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid

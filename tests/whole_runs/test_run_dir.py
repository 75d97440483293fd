"""One command line, whatever it finds in the run directory: nothing, half a run, a whole one, another one, or one that
is going on."""

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml

from mmrl import checkpoints, job
from mmrl.cli.training import train
from mmrl.config import load
from mmrl.errors import UserError
from mmrl.report.lock import LOCK_FILE, RunLock, start_ticks, this_process
from tests.helpers.command_line import mmrl
from tests.whole_runs.parts import MODEL, TINY, command, final, metrics, model_folder, start, wait

RUN = ["train", str(TINY), "steps=6", "checkpoint.every=2"]


def launch(folder, *more):
    return start(command, *RUN, f"run_dir={folder}", *more, log=folder.with_suffix(".log"))


def ends(folder, *more, code=0):
    """What the run says, up to its end."""
    log = folder.with_suffix(".log")
    log.unlink(missing_ok=True)
    assert wait(launch(folder, *more), log) == [code], log.read_text()[-3000:]
    return log.read_text()


def until(condition, process, log, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert (process is None or process.is_alive()) and time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.001)


def steps(folder):
    return [row["step"] for row in metrics(folder) if "loss" in row]


def stopped(folder, number, *more, after=0):
    """A run that gets a signal once it has logged so many steps; its exit code."""
    log = folder.with_suffix(".log")
    (process,) = launch(folder, *more)
    until(lambda: (folder / "metrics.jsonl").exists() and len(metrics(folder)) > after, process, log)
    os.kill(process.pid, number)
    return wait([process], log)[0]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert "resumed" not in ends(folder)
    return folder


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """A run that has ended and left no checkpoint."""
    folder = tmp_path_factory.mktemp("bare") / "run"
    ends(folder, "checkpoint.every=0")
    return folder


def same(one, other):
    a, b = final(one), final(other)
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_a_run_killed_before_its_first_checkpoint_starts_again(tmp_path, whole):
    run = tmp_path / "run"
    assert stopped(run, signal.SIGKILL, "checkpoint.every=100") == -signal.SIGKILL
    assert len(steps(run)) >= 1 and not checkpoints.list_finished(run / "checkpoints")
    assert "resumed" not in ends(run)
    assert steps(run) == [1, 2, 3, 4, 5, 6] and same(run, whole)


def test_a_run_killed_later_goes_on(tmp_path, whole):
    run = tmp_path / "run"
    assert stopped(run, signal.SIGKILL, after=3) == -signal.SIGKILL
    assert "resumed from" in ends(run)
    assert steps(run) == [1, 2, 3, 4, 5, 6] and same(run, whole)


def test_a_run_that_has_ended_stays_as_it_is(whole):
    before = {p: p.stat().st_mtime_ns for p in whole.rglob("*")}
    assert ends(whole) == f"run_dir={whole} holds this run and it is complete; raise steps, or name another run_dir\n"
    assert "holds this run and it is complete" in ends(whole, "steps=5", "log.samples=3")
    assert {p: p.stat().st_mtime_ns for p in whole.rglob("*")} == before


def test_a_longer_run_goes_on_from_the_end_of_a_shorter_one(tmp_path, whole):
    run = tmp_path / "run"
    ends(run, "steps=4")
    assert "step-000004" in ends(run)
    assert steps(run) == [1, 2, 3, 4, 5, 6] and same(run, whole)
    assert "step-000006 is of step 6, but steps=5" not in ends(run, "steps=5")  # it has ended
    (run / "final" / "manifest.json").unlink()
    assert "step-000006 is of step 6, but steps=5; set steps=6 or more" in ends(run, "steps=5", code=2)


@pytest.mark.parametrize(
    ("left", "change", "told"),
    [
        ("whole", ["seed=3"], "seed is 3 but .*step-000006 was trained with 0"),
        ("bare", ["checkpoint.every=0", "seed=3"], "holds a run that ended at step 6 and has no checkpoint"),
        ("bare", ["checkpoint.every=0", "steps=9"], "holds a run that ended at step 6 and has no checkpoint"),
        ("whole", ["checkpoint.resume=false"], "already holds a run; set checkpoint.resume=auto"),
    ],
)
def test_another_run_is_not_overwritten(request, left, change, told):
    run = request.getfixturevalue(left)
    files = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    said = ends(run, *change, code=2)
    assert len(said.splitlines()) == 1 and re.search(told, said), said
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == files


def test_half_a_run_of_another_configuration_is_not_overwritten(tmp_path):
    run = tmp_path / "run"
    stopped(run, signal.SIGKILL, "checkpoint.every=100")
    rows = metrics(run)
    says = "a run without a checkpoint in which optim.eps is 0.0001, not 0.1; set optim.eps to its old value, remove"
    assert any("loss" in row for row in rows)
    assert says in ends(run, "optim.eps=0.1", code=2)
    assert metrics(run) == rows


@pytest.mark.parametrize(
    ("lines", "trained"),
    [([{"step": 0, "evaluation/accuracy": 0.5}], False), ([{"step": 0}, {"step": 1}], True), ([{"step": "x"}], True)],
)
def test_a_run_that_was_not_trained_for_a_step_may_start_with_another_configuration(tmp_path, lines, trained):
    """Such a run ended by a mistake of its configuration, which cannot be mended if the old one has to stay."""
    (tmp_path / "config.yaml").write_text("optim: {eps: 1.0}\n")
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = {"steps": 4, "checkpoint": {"resume": "auto"}, "optim": {"eps": 2.0}}
    if trained:
        with pytest.raises(UserError, match="in which optim.eps is 1.0, not 2.0"):
            checkpoints.check_run_dir(tmp_path, config)
    else:
        assert checkpoints.check_run_dir(tmp_path, config) is False


def test_a_learning_rate_that_was_too_high_can_be_lowered(tmp_path):
    run = tmp_path / "run"
    ends(run, "steps=2")
    said = ends(run, "optim.lr=1e-4", "engine.micro_batch=2")
    assert "optim.lr changes from 0.001 to 0.0001" in said and "engine.micro_batch changes from 3 to 2" in said
    assert [r["lr"] for r in metrics(run) if "loss" in r] == [1e-3] * 2 + [1e-4] * 4


@pytest.mark.parametrize(
    "kind", ["halved", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("zeros", "deleted"))]
)
def test_damage_of_what_is_read_first_stops_nothing(tmp_path, whole, kind):
    """What decides whether to start, to go on or to do nothing is read before checksums of large files are."""
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    for path in (checkpoints.list_finished(run / "checkpoints")[-1] / "trainer.json", run / "final" / "run.json"):
        size = path.stat().st_size
        path.unlink()
        if kind != "deleted":
            path.write_bytes(bytes(size if kind == "zeros" else size // 2))
    said = ends(run)
    assert "step-000006 is damaged and is not used: trainer.json" in said and "step-000004" in said
    assert steps(run) == [1, 2, 3, 4, 5, 6] and same(run, whole)


# --- one at a time ---


def test_a_second_run_in_the_folder_is_refused_until_the_first_is_gone(tmp_path):
    run, log = tmp_path / "run", tmp_path / "second.log"
    first = launch(run, "steps=100000")
    until(lambda: (run / "metrics.jsonl").exists() and len(metrics(run)) > 0, first[0], run.with_suffix(".log"))
    for resume in ("auto", "true", "false"):
        log.unlink(missing_ok=True)
        second = start(command, *RUN, f"run_dir={run}", f"checkpoint.resume={resume}", log=log)
        assert wait(second, log) == [2]
        (line,) = log.read_text().splitlines()
        assert f"run_dir={run} is in use by process {first[0].pid} on" in line
    first[0].kill()
    assert wait(first, run.with_suffix(".log")) == [-signal.SIGKILL]
    ends(run, f"steps={steps(run)[-1] + 1}")  # the lock that it left is nobody's
    seen = steps(run)
    assert seen == sorted(set(seen))


def test_a_file_system_without_locks_is_told_by_the_file(tmp_path, monkeypatch):
    """A living process of this host that is named there holds it; one whose number was given away does not."""

    def unsupported(*arguments):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", unsupported)
    parent = os.getppid()
    for owner, held in [
        ({**this_process(), "process": parent, "started": start_ticks(parent)}, True),
        ({**this_process(), "process": parent, "started": start_ticks(parent) - 1}, False),
        ({**this_process(), "process": 2**22 + 1, "started": 5}, False),
        ({}, False),
    ]:
        (tmp_path / LOCK_FILE).write_text(json.dumps(owner))
        if held:
            with pytest.raises(UserError, match=f"in use by process {parent} on"):
                RunLock(tmp_path)
        else:
            RunLock(tmp_path).release()
    (tmp_path / LOCK_FILE).write_bytes(b"\0" * 20)  # after a power loss
    RunLock(tmp_path).release()
    ended = subprocess.Popen(["sleep", "1000"])
    (tmp_path / LOCK_FILE).write_text(
        json.dumps({**this_process(), "process": ended.pid, "started": start_ticks(ended.pid)})
    )
    with pytest.raises(UserError, match="in use by process"):
        RunLock(tmp_path)
    ended.kill()
    until(lambda: "Z" in Path(f"/proc/{ended.pid}/stat").read_text().rpartition(")")[2], None, tmp_path)
    RunLock(tmp_path).release()  # nobody has asked for its exit code yet, as where a container has no init
    ended.wait()


# --- Ctrl-C ---


def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path):
    run = tmp_path / "run"
    assert stopped(run, signal.SIGINT, "steps=100000", "checkpoint.every=0", after=2) == 130
    said = run.with_suffix(".log").read_text()
    (saved,) = checkpoints.list_finished(run / "checkpoints")
    step = steps(run)[-1]
    assert saved.name == f"step-{step:06d}" and not (run / "final").exists()
    assert f"stopped at step {step} and saved; to continue, repeat the command" in said and "Traceback" not in said
    assert "resumed from" in ends(run, f"steps={step + 1}")
    assert steps(run) == list(range(1, step + 2))


def test_a_second_ctrl_c_ends_at_once(tmp_path):
    run, log = tmp_path / "run", tmp_path / "run.log"
    (process,) = launch(run, "steps=100000", "task.type=tests.whole_runs.parts:Sleeps")
    until(lambda: log.exists() and "asleep" in log.read_text(), process, log)
    os.kill(process.pid, signal.SIGINT)
    until(lambda: "once more ends it at once" in log.read_text(), process, log)
    os.kill(process.pid, signal.SIGINT)
    assert wait([process], log, 60) == [-signal.SIGINT]


def test_ctrl_c_before_the_first_step_is_one_line(tmp_path):
    run, log = tmp_path / "run", tmp_path / "run.log"
    (process,) = launch(run, "task.type=tests.whole_runs.parts:SleepsFirst")
    until(lambda: log.exists() and "asleep" in log.read_text(), process, log)
    os.kill(process.pid, signal.SIGINT)
    assert wait([process], log, 60) == [130]
    said = log.read_text()
    assert said.endswith("mmrl: stopped by Ctrl-C; nothing new to save\n") and "Traceback" not in said


# --- warm starts ---


@pytest.fixture
def recipes(tmp_path):
    """A recipe that starts from what another one ends with; the run directory of that one."""
    model_folder()
    base = yaml.safe_load(TINY.read_text()) | {"run_dir": str(tmp_path / "base"), "steps": 4}
    base["checkpoint"] = {"every": 2, "best": False, "background": False}  # it is there before the next step
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(base))
    after = base | {"run_dir": str(tmp_path / "after"), "steps": 1, "model": {"warm_start": "base.yaml"}}
    (tmp_path / "after.yaml").write_text(yaml.safe_dump(after))
    return tmp_path


def after(recipes, *more):
    return mmrl(recipes, "train", recipes / "after.yaml", *more, **{MODEL: model_folder()})


def test_a_warm_start_that_was_cut_off_is_gone_on_with(recipes):
    log = recipes / "base.log"
    (process,) = start(command, "train", str(recipes / "base.yaml"), log=log)
    base = recipes / "base"
    until(lambda: len(checkpoints.list_finished(base / "checkpoints")) == 1, process, log)
    os.kill(process.pid, signal.SIGTERM)
    assert wait([process], log) == [143] and not (base / "final").exists()
    result = after(recipes)
    assert (result.code, result.err) == (0, ""), result
    assert steps(base) == [1, 2, 3, 4] and steps(recipes / "after") == [1]
    assert yaml.safe_load((recipes / "after" / "config.yaml").read_text())["model"]["path"] == str(base / "final")
    (recipes / "base.yaml").write_text((recipes / "base.yaml").read_text().replace("steps: 4", "steps: 5"))
    result = after(recipes, f"run_dir={recipes / 'again'}")
    assert (
        result.code == 2
        and "was trained with steps=4, not 5; set steps to its old value in that recipe, or remove" in result.err
    )
    weights = base / "final" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    result = after(recipes, f"run_dir={recipes / 'again'}")
    assert result.code == 2 and "model.safetensors has" in result.err and "warm start is run again" in result.err


@pytest.mark.slow
def test_a_job_waits_for_the_warm_start_that_another_one_makes(recipes):
    """The lock of its run directory is held, then the final weights are there: nothing is trained twice."""
    (recipes / "base").mkdir()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD.format(folder=str(recipes / "base"))], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout.readline() == b"held\n"
    log = recipes / "after.log"
    (process,) = start(command, "train", str(recipes / "after.yaml"), log=log)
    until(lambda: log.exists() and "waiting for process" in log.read_text(), process, log)
    assert f"process {holder.pid} on" in log.read_text() and "warm start: mmrl train" not in log.read_text()
    holder.communicate(b"\n")  # it ends without a warm start: the job makes one
    assert wait([process], log) == [0]
    assert log.read_text().count("warm start: mmrl train") == 1 and steps(recipes / "base") == [1, 2, 3, 4]


HOLD = """
from pathlib import Path
from mmrl.report.lock import RunLock
lock = RunLock(Path({folder!r}))
print("held", flush=True)
input()
"""


def test_a_signal_that_stops_a_warm_start_stops_its_job(recipes, monkeypatch, capsys):
    commands = []
    monkeypatch.setattr(job, "run_command", lambda command: commands.append(command) or 128 + signal.SIGTERM)
    assert train(load(recipes / "after.yaml")) == 128 + signal.SIGTERM
    assert commands[0][1:] == ["-m", "mmrl", "train", str(recipes / "base.yaml"), "checkpoint.resume=auto"]
    assert capsys.readouterr().out.endswith(
        f"SIGTERM stopped the warm start {recipes / 'base.yaml'}; run the same command again to resume it\n"
    )
    monkeypatch.setattr(job, "run_command", lambda command: 1)
    with pytest.raises(UserError, match="failed; see its output above"):
        train(load(recipes / "after.yaml"))


@pytest.mark.slow
def test_a_warm_start_gets_the_signals_of_its_job(recipes):
    """The job exits as the signal says; what was trained is saved, and the same command goes on with it."""
    base, log = recipes / "base", recipes / "after.log"
    (recipes / "base.yaml").write_text((recipes / "base.yaml").read_text().replace("every: 2", "every: 100"))
    (process,) = start(command, "train", str(recipes / "after.yaml"), log=log)
    until(lambda: (base / "metrics.jsonl").exists() and steps(base), process, log, seconds=240)
    os.kill(process.pid, signal.SIGUSR1)
    assert wait([process], log) == [128 + signal.SIGUSR1]
    assert log.read_text().endswith("run the same command again to resume it\n")
    assert len(checkpoints.list_finished(base / "checkpoints")) == 1 and not (base / "final").exists()

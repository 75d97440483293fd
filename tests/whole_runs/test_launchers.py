"""The program under the launchers that people use."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.processes import family, gone
from tests.whole_runs.parts import HERE, MODEL, TINY, call, final, metrics, model_folder
from tests.whole_runs.parts import command as mmrl

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "PORT"]
DEEPSPEED = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_accelerators", "2", "--master_port", "PORT"]


def launch(launcher, folder, *settings, **environment):
    """A launcher's process, in a group of its own, that trains the tiny run."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    root = HERE.parents[1]
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(root), "PATH": path, MODEL: model_folder(), **environment}
    command = [port if part == "PORT" else part for part in launcher]
    command += ["--module", "mmrl.cli.main", "train", str(TINY), f"run_dir={folder}", *settings]
    return subprocess.Popen(
        command, cwd=root, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def finished(process, seconds=250):
    try:
        said, _ = process.communicate(timeout=seconds)
    finally:
        process.kill()
    return process.returncode, said


@pytest.mark.slow  # the next one starts two ranks too
@pytest.mark.parametrize("launcher", [TORCHRUN, DEEPSPEED], ids=["torchrun", "deepspeed"])
def test_a_launcher_starts_two_ranks(tmp_path, launcher):
    code, said = finished(launch(launcher, tmp_path, "steps=1", "checkpoint.every=1"))
    assert code == 0, said[-3000:]
    assert [r["step"] for r in metrics(tmp_path)] == [1, 1]
    assert len(list((tmp_path / "checkpoints" / "step-000001").glob("rank-*.pt"))) == 2


@pytest.mark.slow
def test_torchrun_starts_a_killed_rank_again_and_the_run_goes_on(tmp_path):
    """Nobody changes the command line: the ranks that are started again find a checkpoint, and go on from it."""
    command, dies = [*TORCHRUN, "--max-restarts", "1"], "task.type=tests.whole_runs.parts:DiesOnce"
    died = {"MMRL_TESTS_DIED": str(tmp_path / "died")}
    saves = ["checkpoint.every=1", "checkpoint.background=false"]  # a checkpoint is there before the rank dies
    code, said = finished(launch(command, tmp_path / "run", dies, *saves, **died))
    assert code == 0, said[-3000:]
    assert (tmp_path / "died").exists() and "resumed from" in said
    assert [r["step"] for r in metrics(tmp_path / "run") if "loss" in r] == [1, 2, 3, 4]
    assert len(list((tmp_path / "run" / "checkpoints" / "step-000004").glob("rank-*.pt"))) == 2
    unbroken = [f"run_dir={tmp_path / 'other'}", "task.type=tests.whole_runs.parts:Steady"]
    call(mmrl, "train", str(TINY), *unbroken, log=tmp_path / "log", ranks=2)
    one, other = final(tmp_path / "run"), final(tmp_path / "other")
    assert all(one[name].equal(other[name]) for name in one)


def test_ranks_end_with_their_launcher(tmp_path):
    process = launch(TORCHRUN, tmp_path, "steps=100000", "checkpoint.every=0")
    try:
        until = time.monotonic() + 120
        while not (tmp_path / "metrics.jsonl").exists() or not metrics(tmp_path):
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.2)
        ranks = family(process.pid)[1:]
        assert len(ranks) == 2
        process.send_signal(signal.SIGKILL)
        assert gone(ranks)
    finally:
        process.kill()
        process.communicate()

"""The program under the launchers that people use."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.parts import HERE, MODEL, TINY, metrics, model_folder

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "PORT"]
DEEPSPEED = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_accelerators", "2", "--master_port", "PORT"]


@pytest.mark.parametrize("launcher", [[*TORCHRUN, "--module"], [*DEEPSPEED, "--module"]], ids=["torchrun", "deepspeed"])
def test_a_launcher_starts_two_ranks(tmp_path, launcher):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    root = HERE.parents[1]
    model_folder()
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(root), "PATH": path, MODEL: model_folder()}
    arguments = ["mmrl.cli", "train", str(TINY), f"run_dir={tmp_path}", "steps=1", "checkpoint.every=1"]
    command = [port if part == "PORT" else part for part in launcher] + arguments
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=270)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert [r["step"] for r in metrics(tmp_path)] == [1, 1]
    assert len(list((tmp_path / "checkpoints" / "step-000001").glob("rank-*.pt"))) == 2

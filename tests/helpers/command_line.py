"""Runs commands of mmrl, each in a process of its own that is forked with the heavy imports already done."""

import multiprocessing
import os
import sys
from pathlib import Path
from typing import NamedTuple

from mmrl.cli.main import main

ROOT = Path(__file__).parents[2]
WARM_START = str(ROOT / "configs" / "warm_starts" / "vlm" / "visual_qa_digits_warm_start.yaml")
TINY = ["steps=2", "rollout.prompts=8", "evaluation.prompts=8", "task.data.train_size=100", "threads=1"]
GRPO = ["algorithm.type=grpo", "rollout.group_size=4"]

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(
    ["mmrl.trainer", "mmrl.policies.vlm.policy", "mmrl.tasks.visual_qa", "mmrl.tasks.visual_qa.tiny.model"]
)


class Result(NamedTuple):
    code: int | None
    out: str
    err: str


def mmrl(folder: Path, *arguments: str, **environment: str) -> Result:
    """What `mmrl ARGUMENTS` prints and exits with; output is kept in `folder`."""
    out, err = folder / "stdout", folder / "stderr"
    process = _processes.Process(target=_run, args=([*map(str, arguments)], environment, out, err))
    process.start()
    process.join(120)
    process.kill()
    return Result(process.exitcode, out.read_text(), err.read_text())


def _run(arguments: list[str], environment: dict[str, str], out: Path, err: Path) -> None:
    for descriptor, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", closefd=False)
    os.chdir(environment.pop("cwd", ROOT))
    os.environ.update(environment)
    try:
        main(arguments)
    finally:
        sys.stdout.flush()

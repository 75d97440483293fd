"""Attacks a job during its warm start: signals to the job, kills, and a second job that needs the same warm start.

    python scripts/attack/warm_starts.py [--only PATTERN]

Everything runs on this machine, in a temporary directory, with the tiny model of the tests. Exits with 1 if a case had
an unexpected result.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from scripts.attack.table import Table  # noqa: E402
from tests.whole_runs.parts import TINY, metrics, model_folder  # noqa: E402

WAIT_S = 300.0
STEPS = 40


class Recipes:
    """A recipe that starts from what another one ends with, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        model_folder()
        self.folder, self.base = folder, folder / "base"
        tree = yaml.safe_load(TINY.read_text()) | {"run_dir": str(self.base), "steps": STEPS}
        tree["checkpoint"] = {"every": 10, "best": False, "background": False}
        (folder / "base.yaml").write_text(yaml.safe_dump(tree))
        after = tree | {"run_dir": str(folder / "after"), "steps": 1, "model": {"warm_start": "base.yaml"}}
        (folder / "after.yaml").write_text(yaml.safe_dump(after))

    def start(self, name: str = "after") -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "mmrl", "train", "after.yaml", f"run_dir={self.folder / name}"]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(command, cwd=self.folder, env=environment, stdout=log, stderr=log)

    def in_warm_start(self) -> subprocess.Popen[bytes]:
        """Returns a job whose warm start has made two steps."""
        job = self.start()
        until(lambda: self.steps() >= 2)
        return job

    def steps(self) -> int:
        return len(metrics(self.base)) if (self.base / "metrics.jsonl").exists() else 0

    def goes_on(self) -> str:
        """Returns what becomes of the same command."""
        steps = self.steps()
        time.sleep(2.0)
        if steps < self.steps():
            return "the warm start trains on alone"
        code = self.start().wait(WAIT_S)
        return "the same command goes on" if code == 0 else f"the same command ends with {code}"


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"not so after {WAIT_S:g} s")
        time.sleep(0.02)


def signalled(number: int, *, alone: bool = True) -> str:
    """Sends a signal to a job in its warm start; alone: not to the warm start as well, as schedulers and terminals
    do."""
    with tempfile.TemporaryDirectory() as folder:
        recipes = Recipes(Path(folder))
        job = recipes.in_warm_start()
        children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        for pid in [job.pid, *(() if alone else map(int, children))]:
            os.kill(pid, number)
        code = job.wait(WAIT_S)
        saved = any((recipes.base / "checkpoints").iterdir())
        return f"{code}, {'saved' if saved else 'not saved'}; {recipes.goes_on()}"


def two_jobs() -> str:
    with tempfile.TemporaryDirectory() as folder:
        recipes = Recipes(Path(folder))
        first, second = recipes.in_warm_start(), recipes.start("second")
        return f"{first.wait(WAIT_S)} and {second.wait(WAIT_S)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="try the cases whose name matches this pattern")
    only = parser.parse_args().only
    table = Table("warm starts")
    wanted = "saved; the same command goes on"
    cases: list[tuple[str, Callable[[], str], tuple[str, ...]]] = [
        ("kill -9 of the job", lambda: signalled(signal.SIGKILL), (f"-9, not {wanted}", f"-9, {wanted}")),
        ("SIGTERM to the job", lambda: signalled(signal.SIGTERM), (f"143, {wanted}",)),
        ("SIGTERM to all of it", lambda: signalled(signal.SIGTERM, alone=False), (f"143, {wanted}",)),
        ("SIGUSR1 to the job", lambda: signalled(signal.SIGUSR1), (f"138, {wanted}",)),
        ("Ctrl-C", lambda: signalled(signal.SIGINT, alone=False), (f"130, {wanted}",)),
        ("two jobs, one warm start", two_jobs, ("0 and 0",)),
    ]
    for name, attempt, outcomes in cases:
        if re.search(only, name):
            table.case(name, name, attempt, *outcomes)
    return table.finish()


if __name__ == "__main__":
    sys.exit(main())

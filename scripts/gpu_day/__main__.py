"""`python -m scripts.gpu_day --out DIR [--parts kernels,learning,language,images,robots] [--small] [--only REGEX]
    [--limit SECONDS]`

Runs the commands of each part, each in a process of its own with its log in DIR, and writes gpu_day.json and gpu_day.md
there. A command that fails costs only its own row. Jobs of the part "learning" share the GPU, all others run alone.
--only: run the commands whose name matches. --limit: after this time no further command is started.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.gpu_day import arms
from scripts.gpu_day.arms import Arm

PARTS = ("kernels", "learning", "language", "images", "robots")
SHOWN = ("time/step", "time/rollout", "time/update", "time/rewards", "memory/gpu_gib")  # and all of throughput/


@dataclass
class Result:
    """What a command gave: seconds, how it ended, and metrics of its last step or lines of its output."""

    part: str
    name: str
    expects: str
    seconds: float
    status: str
    metrics: dict[str, float] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)


@dataclass
class Running:
    name: str
    process: subprocess.Popen[bytes]
    log: Path
    begun: float


class Day:
    """Runs commands and keeps their results. out: of logs and results; scratch: of models and runs."""

    def __init__(self, out: Path, scratch: Path, small: bool, limit: float, only: str) -> None:
        self.out, self.scratch, self.small, self.limit, self.only = out, scratch, small, limit, re.compile(only)
        self.begun = time.monotonic()
        self.results: list[Result] = []

    def start(self, name: str, command: list[str]) -> Running:
        log = self.out / f"{name.replace(' ', '_').replace(',', '')}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, *command], stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
        return Running(name, process, log, time.monotonic())

    def left(self) -> float:
        return self.limit - (time.monotonic() - self.begun)

    def wait(self, running: Running) -> tuple[float, str, list[str]]:
        """Returns a command's seconds, "" or why it failed, and the lines of its output."""
        try:
            code = running.process.wait(max(1.0, self.left()))
        except subprocess.TimeoutExpired:
            os.killpg(running.process.pid, 9)
            running.process.wait()
            code = -9
        took = time.monotonic() - running.begun
        lines = running.log.read_text(errors="replace").splitlines()
        last = next((line for line in reversed(lines) if line.strip()), "")
        return took, "" if code == 0 else f"exit {code}: {last[:300]}", lines

    def keep(self, result: Result) -> None:
        self.results.append(result)
        print(f"[{time.monotonic() - self.begun:4.0f} s] {result.part}, {result.name}: {result.status}", flush=True)
        self.write()

    def command(
        self, part: str, name: str, command: list[str], shown: Callable[[str], bool], expects: str = ""
    ) -> None:
        """Runs a command and keeps the lines of its output that are to be shown."""
        if not self.only.search(name):
            return
        took, problem, lines = self.wait(self.start(name, command))
        self.keep(Result(part, name, expects, took, problem or "done", lines=[line for line in lines if shown(line)]))

    def train(self, some: list[Arm]) -> None:
        """Runs jobs, side by side where there are several, and keeps the metrics of their steps."""
        started = []
        for arm in (arm for arm in some if self.only.search(arm.name)):
            run = self.scratch / "runs" / f"{arm.part}_{arm.name}".replace(" ", "_").replace(",", "")
            shutil.rmtree(run, ignore_errors=True)
            started.append((arm, run, self.start(f"{arm.part} {arm.name}", ["-m", "mmrl", "train", *arm.command(run)])))
        for arm, run, running in started:
            took, problem, _ = self.wait(running)
            self.keep(Result(arm.part, arm.name, arm.expects, took, problem or "done", metrics_of(run, arm.timed)))

    def write(self) -> None:
        (self.out / "gpu_day.json").write_text(json.dumps([vars(result) for result in self.results], indent=1) + "\n")
        (self.out / "gpu_day.md").write_text("\n".join(page(self.results)) + "\n")


def metrics_of(run: Path, timed: bool) -> dict[str, float]:
    """Returns the metrics of the last step of a timed job, or first and last evaluation of another."""
    file = run / "metrics.jsonl"
    if not file.is_file():
        return {}
    rows: list[dict[str, Any]] = [json.loads(line) for line in file.read_text().splitlines()]
    if timed:
        steps = [row for row in rows if "loss" in row]
        last = steps[-1] if steps else {}
        return {k: v for k, v in last.items() if k in SHOWN or k.startswith(("throughput/", "response/", "surrogate/"))}
    found: dict[str, float] = {}
    for row in rows:
        for name, value in row.items():
            if name.startswith("evaluation/") and isinstance(value, float):
                found.setdefault(f"first {name}", value)
                found[f"last {name}"] = value
    last = next((row for row in reversed(rows) if "time/step" in row), {})
    return found | {name: last[name] for name in SHOWN if name in last}


def page(results: list[Result]) -> list[str]:
    """Returns the lines of a Markdown page."""
    lines = ["# An hour on a GPU", ""]
    for result in results:
        lines += [f"## {result.part}: {result.name}", "", f"{result.status}, {result.seconds:.0f} s"]
        lines += [f"predicted: {result.expects}"] if result.expects else []
        lines += [""]
        if result.metrics:
            lines += ["| metric | last step |", "| --- | --- |"]
            lines += [f"| {name} | {value:.4g} |" for name, value in sorted(result.metrics.items())] + [""]
        lines += [*result.lines, ""] if result.lines else []
    return lines


def kernels(day: Day) -> None:
    doctor = ["-m", "mmrl", "doctor", "--gpu", "--only", "ranks,renderers", "--limit", "60"]
    day.command("kernels", "doctor", doctor, lambda line: bool(line.strip()))
    tests = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--import-mode=append", "tests/kernels"]
    tests += ["tests/policies/test_packing.py", "-k", "cuda and not host and not library or flash", "--maxfail", "5"]
    day.command("kernels", "tests against float64", tests, lambda line: "passed" in line or "Error" in line)
    small = ["--scale", "0.02", "--rounds", "1", "--threads", "1"]
    table = ["scripts/bench/kernels.py", *(small if day.small else ["--rounds", "5", "--block", "0.02"])]
    expects = "denoising at copy speed, hidden_logprob 1.2 times Liger's"
    day.command("kernels", "beside eager and compiled", table, lambda line: "|" in line or "copy" in line, expects)


def learning(day: Day) -> None:
    day.train(arms.learning(day.small))


def written(day: Day, kind: str) -> Path:
    """Returns the folder of a model and its data, which a process of its own writes: it takes memory of the GPU."""
    folder = day.scratch / kind
    if not (folder / "done").is_file():
        command = ["-m", "scripts.gpu_day.models", kind, str(folder), *(["--small"] if day.small else [])]
        took, problem, _ = day.wait(day.start(f"model of {kind}", command))
        day.keep(Result(kind, f"model of {kind}", "", took, problem or "done"))
        if not problem:
            (folder / "done").touch()
    return folder


def one_by_one(day: Day, some: list[Arm]) -> None:
    for arm in some:
        if day.left() > 0:
            day.train([arm])


def language(day: Day) -> None:
    folder = written(day, "language")
    some = arms.language(folder / "model", folder / "data" / "train.jsonl", day.small)
    one_by_one(day, some)
    profiled(day, some[0])


def profiled(day: Day, arm: Arm) -> None:
    """Runs an arm again and keeps where the time of its second update went."""
    out, name = day.scratch / f"profile_{arm.part}.txt", f"{arm.name}, profiled"
    if day.left() <= 0 or not day.only.search(name):
        return
    command = [
        "-m",
        "scripts.gpu_day.profile",
        str(out),
        "train",
        *arm.command(day.scratch / "runs" / f"{arm.part}_profile"),
    ]
    took, problem, _ = day.wait(day.start(f"{arm.part} {name}", command))
    lines = out.read_text().splitlines() if out.is_file() else []
    day.keep(Result(arm.part, name, "the device works half of the time or more", took, problem or "done", lines=lines))


def images(day: Day) -> None:
    folder = written(day, "images")
    some = arms.images(folder / "model", folder / "data" / "prompts.txt", day.small)
    one_by_one(day, some)
    profiled(day, some[0])


def robots(day: Day) -> None:
    one_by_one(day, arms.robots(written(day, "language") / "model", day.small))


RUNS: dict[str, Callable[[Day], None]] = {
    "kernels": kernels,
    "learning": learning,
    "language": language,
    "images": images,
    "robots": robots,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--limit", type=float, default=3600.0)
    options = parser.parse_args()
    day = Day(options.out, options.scratch, options.small, options.limit, options.only)
    for part in options.parts.split(","):
        RUNS[part](day)
    print((options.out / "gpu_day.md").read_text())


if __name__ == "__main__":
    main()

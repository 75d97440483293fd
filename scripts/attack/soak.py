"""Trains one small job for minutes: do memory, file descriptors, threads or temporary files grow from step to step?

    python scripts/attack/soak.py [--seconds S] [--only PATTERN]

Jobs of images and robots have a worker process that makes rollouts a step ahead; the job of visual questions scores in
the background. All have an EMA, and write a checkpoint every tenth step. Memory and counts of each process in the last
third of the time are compared with those in the middle third. Then the job gets SIGTERM: it has to save and to end with
143, and none of its processes may be left. It needs Linux. Exits with 1 if a case had an unexpected result.
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
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from scripts.attack.table import Table  # noqa: E402
from tests.whole_runs.parts import IMAGES, ROBOTS, TINY, metrics, model_folder  # noqa: E402

AHEAD = "rollout.workers={count: 1, async_steps: 1}"
KINDS = {"visual QA": (TINY, "rollout.score_in_background=true"), "images": (IMAGES, AHEAD), "robots": (ROBOTS, AHEAD)}
OPTIONS = ["optim.ema=0.5", "checkpoint={every: 10, best: false}", "steps=1000000"]
OPTIONS += ["evaluation.before=false", "evaluation.every=0"]
COUNTS = ("descriptors", "threads", "files")  # of `Look`
GROWTH = 1.05  # of the memory of a process, from the middle third to the last one
WAIT_S = 300.0  # until the first step, and from SIGTERM to the end


@dataclass(frozen=True)
class Look:
    """What a job has at one moment. memory: in MiB, by process, the largest first. descriptors, threads: those of all
    processes. files: temporary ones."""

    memory: tuple[float, ...]
    descriptors: int
    threads: int
    files: int


def look(job: psutil.Process, folder: Path) -> Look:
    """Returns what a job and its child processes have now. folder: its folder for temporary files."""
    found = []
    for process in [job, *job.children(recursive=True)]:
        try:
            found.append((process.memory_info().rss / 2**20, process.num_fds(), process.num_threads()))
        except psutil.NoSuchProcess:  # it has ended since
            continue
    memory, descriptors, threads = zip(*sorted(found, reverse=True), strict=True)
    return Look(memory, sum(descriptors), sum(threads), sum(1 for _ in folder.iterdir()))


def growth(looks: list[Look]) -> str:
    """Returns "nothing grows", or what does. looks: of the whole time, in order."""
    third = len(looks) // 3
    middle, last = looks[third : 2 * third], looks[2 * third :]
    problems = []
    for number, (before, after) in enumerate(zip(sizes(middle), sizes(last), strict=False)):
        if after > GROWTH * before + 1:  # MiB
            problems.append(f"memory of process {number} from {before:.0f} to {after:.0f} MiB")
    for name in COUNTS:
        before, after = (max(vars(one)[name] for one in part) for part in (middle, last))
        if after > before + 2:  # a checkpoint in the background comes and goes
            problems.append(f"{name} from {before} to {after}")
    return ", ".join(problems) or "nothing grows"


def sizes(looks: Iterable[Look]) -> list[float]:
    """Returns the median memory of each process, in MiB, the largest first."""
    rows = [one.memory for one in looks]
    count = min(map(len, rows))
    return [median(row[number] for row in rows) for number in range(count)]


def soaked(kind: str, seconds: float) -> str:
    """Returns what became of a job of this kind, and prints its figures."""
    with tempfile.TemporaryDirectory(prefix="mmrl-soak-") as place:
        run, own = Path(place) / "run", Path(place) / "tmp"
        own.mkdir()
        base, *more = KINDS[kind]
        command = [sys.executable, "-m", "mmrl", "train", str(base), *more, *OPTIONS, f"run_dir={run}"]
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        with (Path(place) / "log.txt").open("w") as log:
            environment = os.environ | {"TMPDIR": str(own), "PYTHONPATH": path}
            running = subprocess.Popen(command, cwd=place, env=environment, stdout=log, stderr=log)
        job, late = psutil.Process(running.pid), time.monotonic() + WAIT_S
        while not (run / "metrics.jsonl").exists() or len(metrics(run)) < 5:
            if running.poll() is not None or time.monotonic() > late:
                running.kill()
                return f"no step: {(Path(place) / 'log.txt').read_text()[-300:]}"
            time.sleep(0.2)
        looks, end = [], time.monotonic() + seconds
        while time.monotonic() < end and running.poll() is None:
            looks.append(look(job, own))
            time.sleep(seconds / 120)
        family = job.children(recursive=True)
        running.send_signal(signal.SIGTERM)
        code = running.wait(WAIT_S)
        left = psutil.wait_procs(family, timeout=10)[1]
        first, last = looks[len(looks) // 3], looks[-1]
        memory = ", ".join(f"{a:.0f} to {b:.0f}" for a, b in zip(first.memory, last.memory, strict=False))
        counts = ", ".join(f"{name} {vars(first)[name]} to {vars(last)[name]}" for name in COUNTS)
        print(f"{kind}: {len(metrics(run))} steps, MiB of its processes {memory}; {counts}", flush=True)
        return f"{code}, {len(left)} processes left, {growth(looks)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1200.0, help="how long each kind of job is trained")
    parser.add_argument("--only", default="", help="train the kinds of job whose name matches this pattern")
    options = parser.parse_args()
    model_folder()
    table = Table("soak")
    for kind in KINDS:
        if re.search(options.only, kind):
            wanted = "143, 0 processes left, nothing grows"
            table.case(f"{options.seconds:g} s, {kind}", kind, lambda kind=kind: soaked(kind, options.seconds), wanted)
    return table.finish()


if __name__ == "__main__":
    sys.exit(main())

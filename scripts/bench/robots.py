"""Environment steps a second of the tabletop, and how often its experts succeed; side by side in one run.

    .venv/bin/python scripts/bench/robots.py [--parts environment,experts] [--rounds 5] [--json PATH]

environment: 16 environments under random actions, episodes restarting by themselves, for each picture size and number
    of threads. A step is one action executed in one environment. With a chunk of 1 every step is rendered, with a chunk
    of 8 every eighth. The arms take turns, round after round, so that a busy machine burdens all of them; figures are
    the median (least .. greatest) over the rounds. `CPU ms` is processor time for one step, all threads together.
experts: success over seeds and the mean number of steps to it, per task.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from sims import VectorSim, build, run_episodes
from sims.mujoco import TASKS

COUNT = 16
SIZES, THREADS, CHUNKS = (64, 128), (1, 2), (1, 8)
TASK = "pick_and_place"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default="environment,experts")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    parser.add_argument("--seeds", type=int, default=100, help="episodes of each expert")
    parser.add_argument("--json", help="write the numbers here")
    options = parser.parse_args()
    results: dict[str, Any] = {"load_average": os.getloadavg(), "processors": len(os.sched_getaffinity(0))}
    parts = {
        "environment": lambda: environment(options.rounds, options.seconds),
        "experts": lambda: experts(options.seeds),
    }
    for part in options.parts.split(","):
        results[part] = parts[part]()
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=2) + "\n")


def environment(rounds: int, seconds: float) -> list[dict[str, Any]]:
    """Prints the table of steps a second and returns its rows."""
    sims = {(size, threads): make(size, threads) for size in SIZES for threads in THREADS}
    arms = [(*arm, chunk) for arm in sims for chunk in CHUNKS]
    taken: dict[tuple[int, int, int], list[tuple[float, float]]] = {arm: [] for arm in arms}
    for _ in range(rounds):
        for size, threads, chunk in arms:
            taken[size, threads, chunk].append(measure(sims[size, threads], chunk, seconds))
    for sim in sims.values():
        sim.close()
    print("| pixels | threads | chunk | steps/s | CPU ms | against 1 thread |\n| --- | --- | --- | --- | --- | --- |")
    rows = []
    for size, threads, chunk in arms:
        speed, cost = zip(*taken[size, threads, chunk], strict=True)
        ratio = [mine / base for mine, (base, _) in zip(speed, taken[size, 1, chunk], strict=True)]
        rows.append({"pixels": size, "threads": threads, "chunk": chunk, "steps_per_s": speed, "cpu_ms": cost})
        cells = (summary(speed, ".0f"), summary(cost, ".2f"), summary(ratio, ".2f"))
        print(f"| {size} | {threads} | {chunk} | {' | '.join(cells)} |")
    return rows


def make(size: int, threads: int) -> VectorSim:
    options = {"image_size": size, "threads": threads, "end_on_success": False}
    sim = build("tabletop", COUNT, options, end_of_episode="auto_reset")
    sim.reset(range(COUNT), [TASK] * COUNT)
    measure(sim, 1, 0.2)
    return sim


def measure(sim: VectorSim, chunk: int, seconds: float) -> tuple[float, float]:
    """Steps a second and milliseconds of processor time a step."""
    rng, steps = np.random.default_rng(0), 0
    start, processor = time.perf_counter(), time.process_time()
    while time.perf_counter() - start < seconds:
        steps += int(sim.step(rng.uniform(-1, 1, (COUNT, chunk, 4))).valid.sum())
    return steps / (time.perf_counter() - start), 1000 * (time.process_time() - processor) / steps


def summary(values: Any, form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}} .. {max(values):{form}})"


def experts(seeds: int) -> list[dict[str, Any]]:
    """Prints the table of the experts' success and returns its rows."""
    print(f"\n| task | success over {seeds} seeds | mean steps | limit |\n| --- | --- | --- | --- |")
    rows = []
    with build("tabletop", seeds, {"image_size": 8}) as sim:
        for name, task in TASKS.items():
            success, length = run_episodes(
                sim, range(seeds), [name] * seeds, lambda _, active: sim.expert(active, length=8)
            )
            steps = float(length[success].mean()) if success.any() else float("nan")
            rows.append({"task": name, "success": float(success.mean()), "steps": steps})
            print(f"| {name} | {success.mean():.3f} | {steps:.1f} | {task.max_steps} |")
    return rows


if __name__ == "__main__":
    main()

"""The robot recipes with several seeds, each from its own base: success before and after RL, minutes in all.

    .venv/bin/python scripts/bench/manipulation.py [--seeds 3] [--recipes token,ppo] [--runs FOLDER] [KEY=VALUE ...]
    .venv/bin/python scripts/bench/manipulation.py --recipes maniskill,maniskill_control --runs build/maniskill
    .venv/bin/python scripts/bench/manipulation.py --recipes babyai --runs build/babyai threads=1
    .venv/bin/python scripts/bench/manipulation.py --recipes ogbench,ogbench_control --runs build/ogbench

The base is the policy before RL, trained on demonstrations. KEY=VALUE: further overrides of every run, bases included.
Runs that exist in --runs are not repeated. `minutes` is wall-clock time of demonstrations, warm start, training and
evaluations. `shuffled` is the success rate of the trained policy when every episode shows the instruction of another
one; it is left out for PushCube and OGBench's window, which have one instruction. PushCube starts from random weights.
Success is measured on held-out start states with the most likely actions. Prints a Markdown table, a second one by task
if a run has several tasks, and writes a JSON file of the curves beside the runs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from mmrl.report.intervals import wilson

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench import recipes  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
BASES = {
    "token": "manipulation_tabletop_warm_start",
    "flow": "manipulation_tabletop_flow_warm_start",
    "lift": "manipulation_tabletop_lift_warm_start",
    "place": "manipulation_tabletop_place_warm_start",
    "tasks": "manipulation_tabletop_tasks_warm_start",
    "babyai": "manipulation_babyai_warm_start",
    "ogbench": "manipulation_ogbench_warm_start",
}
RECIPES = {  # base and configuration; without a base: from random weights
    "token": ("token", "manipulation_tabletop"),
    "ppo": ("token", "manipulation_tabletop_ppo"),
    "flow": ("flow", "manipulation_tabletop_flow"),
    "control": ("token", "manipulation_tabletop_control"),
    "lift": ("lift", "manipulation_tabletop_lift"),
    "lift_ppo": ("lift", "manipulation_tabletop_lift_ppo"),
    "lift_control": ("lift", "manipulation_tabletop_lift_control"),
    "place": ("place", "manipulation_tabletop_place"),
    "place_control": ("place", "manipulation_tabletop_place_control"),
    "push": ("tasks", "manipulation_tabletop_push"),
    "push_control": ("tasks", "manipulation_tabletop_push_control"),
    "tasks": ("tasks", "manipulation_tabletop_tasks"),
    "tasks_control": ("tasks", "manipulation_tabletop_tasks_control"),
    "babyai": ("babyai", "manipulation_babyai"),
    "babyai_control": ("babyai", "manipulation_babyai_control"),
    "ogbench": ("ogbench", "manipulation_ogbench"),
    "ogbench_control": ("ogbench", "manipulation_ogbench_control"),
    "maniskill": ("", "manipulation_maniskill_pushcube"),
    "maniskill_control": ("", "manipulation_maniskill_pushcube_control"),
}
WORDLESS = ("", "ogbench")  # bases of recipes with one instruction: there is none to exchange it with
OTHERS = ("maniskill", "babyai", "ogbench")  # need an extra, and so are run by name only

TASK = "evaluation/accuracy/"  # how the success of one task begins


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--recipes", default=",".join(name for name in RECIPES if not name.startswith(OTHERS)))
    parser.add_argument("--runs", type=Path, default=ROOT / "build/tabletop")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    print("| recipe | seed | before | after | gain (95 %) | shuffled | minutes |\n|" + " --- |" * 7)
    curves: dict[str, Any] = {}
    tasks: list[str] = []  # lines of the second table
    for seed in range(options.seeds):
        for recipe in options.recipes.split(","):
            head, config = RECIPES[recipe]
            run, overrides, seconds = options.runs / f"{recipe}-{seed}", [], 0.0
            if head:
                base = options.runs / f"base-{head}-{seed}"
                seconds += train(BASES[head], base, seed, *options.overrides)
                overrides = ["model.warm_start=null", f"model.path={base / 'final'}"]
            seconds += train(config, run, seed, *overrides, *options.overrides)
            curve = {row["step"]: row["evaluation/accuracy"] for row in rows(run) if "evaluation/accuracy" in row}
            curves[f"{recipe}-{seed}"] = curve
            (before, after), n = list(curve.values())[:: len(curve) - 1], int(rows(run)[0]["evaluation/n"])
            shuffled = f"{success(config, run, seed, *options.overrides):.3f}" if head not in WORDLESS else ""
            print(line([recipe, seed, *gained(before, after, n), shuffled, f"{seconds / 60:.1f}"]), flush=True)
            tasks += [line([recipe, seed, *cells]) for cells in by_task(rows(run))]
    if tasks:
        print("\n| recipe | seed | task | before | after | gain (95 %) |\n|" + " --- |" * 6, *tasks, sep="\n")
    (options.runs / "curves.json").write_text(json.dumps(curves, indent=2))


def line(cells: list[Any]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def gained(before: float, after: float, n: int) -> list[str]:
    """Two shares of n, and their difference with its interval."""
    low, high = difference(before, after, n)
    return [f"{before:.3f}", f"{after:.3f}", f"{after - before:+.3f} ({low:+.3f} .. {high:+.3f})"]


def by_task(steps: list[dict[str, Any]]) -> list[list[str]]:
    """The same of each task, its name first, where the evaluations of a run have several. A run's evaluations give
    every task as many episodes."""
    seen = [row for row in steps if "evaluation/accuracy" in row]
    names = sorted(name for name in seen[0] if name.startswith(TASK))
    n = int(seen[0]["evaluation/n"]) // max(1, len(names))
    return [[name.removeprefix(TASK), *gained(seen[0][name], seen[-1][name], n)] for name in names if len(names) > 1]


def train(config: str, run: Path, seed: int, *overrides: str) -> float:
    """Unless that was done before; returns its seconds. A run that did not reach its end is made anew: gone on with it
    would seem shorter than it was."""
    if not (run / "seconds").is_file():
        shutil.rmtree(run, ignore_errors=True)
        started = time.monotonic()
        mmrl(*recipes.command(config), f"seed={seed}", f"run_dir={run}", *overrides)
        (run / "seconds").write_text(str(time.monotonic() - started))
    return float((run / "seconds").read_text())


def success(config: str, run: Path, seed: int, *overrides: str) -> float:
    """With shuffled instructions, from the result file of `mmrl eval`."""
    result = run / "evaluation.json"
    if not result.is_file():
        shuffled = [f"seed={seed}", "task.instructions=shuffled", *overrides]
        mmrl("eval", str(run), str(recipes.file(config)), *shuffled)
    return json.loads(result.read_text())["evaluation/accuracy"]


def mmrl(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "mmrl", *arguments], cwd=ROOT, env=os.environ, check=True, stdout=sys.stderr)


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def difference(before: float, after: float, n: int) -> tuple[float, float]:
    """Newcombe's interval of the difference of two shares of n, from their Wilson intervals (1998, method 10)."""
    (low_b, high_b), (low_a, high_a) = wilson(round(before * n), n), wilson(round(after * n), n)
    gain = after - before
    down, up = (
        ((after - low_a) ** 2 + (high_b - before) ** 2) ** 0.5,
        ((high_a - after) ** 2 + (before - low_b) ** 2) ** 0.5,
    )
    return gain - down, gain + up


if __name__ == "__main__":
    main()

"""Recipes for images of digits, shapes or named things with several seeds: accuracy, time, metrics of reward hacking.

    .venv/bin/python scripts/bench/image_digits.py [--seeds 3] [--recipes perceptron,nft] [--runs FOLDER]
        [KEY=VALUE ...]
    .venv/bin/python scripts/bench/image_digits.py --data shapes [--seeds 3] [--runs FOLDER] [KEY=VALUE ...]

--data may be named_images too. KEY=VALUE: further overrides of every run. Runs that exist in --runs are not repeated.
All start from the same weights. Each run uses one thread. Prints a Markdown table of means over the seeds (smallest ..
greatest). Accuracy is measured on held-out prompts: for digits by a classifier that was trained on other images than
the rewarding one; for shapes by the exact checker, on combinations that do not occur in RL; for named images by a
classifier of the style that the model draws. Time is that of training steps, without evaluations and start-up.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench import recipes  # noqa: E402

SPENT = "processor_seconds.txt"
ROOT = Path(__file__).resolve().parents[2]
RECIPES = {
    "digits": ["perceptron", "dance", "cps", "window", "branch", "nft", "awm", "perceptron_control"],
    "shapes": ["", "control"],
    "named_images": ["", "control"],
}
TIME = {"digits": ("seconds", 1), "shapes": ("minutes", 60), "named_images": ("minutes", 60)}
GUARDS = ["out_of_gamut", "second_scorer", "sharpness"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", choices=list(RECIPES), default="digits")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--recipes", help="recipes, comma-separated; default: all of --data")
    parser.add_argument("--runs", type=Path, help="folder of the runs; default: build/image_DATA")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    recipes = RECIPES[options.data] if options.recipes is None else options.recipes.split(",")
    folder = options.runs or ROOT / f"build/image_{options.data}"
    unit, seconds = TIME[options.data]
    heads = ["recipe", "accuracy before", "after", unit, *(f"{guard} before, after" for guard in GUARDS)]
    print(f"| {' | '.join(heads)} |\n|{' --- |' * len(heads)}")
    for recipe in recipes:
        name = "_".join(filter(None, ["image", options.data, recipe]))
        runs = [
            finished(name, folder / f"{recipe or options.data}-{seed}", seed, *options.overrides)
            for seed in range(options.seeds)
        ]
        guards = [f"{mean(runs, f'guard/{g}', 0)}, {mean(runs, f'guard/{g}', -1)}" for g in GUARDS]
        accuracy = [
            mean(runs, "accuracy", 0, digits=3),
            spread([evaluations(r)[-1]["evaluation/accuracy"] for r in runs]),
        ]
        spent = [sum(row["time/step"] for row in run if "time/step" in row) / seconds for run in runs]
        time = spread(spent, digits=int(seconds > 1))
        print(f"| {' | '.join([recipe or options.data, *accuracy, time, *guards])} |", flush=True)


def finished(name: str, run: Path, seed: int, *overrides: str) -> list[dict[str, Any]]:
    """The metrics of one run, which is made if it does not exist. The processor's seconds for it are left in it."""
    if not (run / "final").is_dir():
        before = processor_time()
        command = [sys.executable, "-m", "mmrl", *recipes.command(name)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(
            [*command, f"seed={seed}", f"run_dir={run}", *overrides],
            cwd=ROOT,
            env=environment,
            check=True,
            stdout=sys.stderr,
        )
        (run / SPENT).write_text(str(processor_time() - before))
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def processor_time() -> float:
    """Seconds that the processor spent on child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def evaluations(run: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in run if "evaluation/accuracy" in row]


def mean(runs: list[list[dict[str, Any]]], name: str, place: int, digits: int = 2) -> str:
    values = [evaluations(run)[place][f"evaluation/{name}"] for run in runs]
    return f"{sum(values) / len(values):.{digits}f}"


def spread(values: list[float], digits: int = 3) -> str:
    return f"{sum(values) / len(values):.{digits}f} ({min(values):.{digits}f} .. {max(values):.{digits}f})"


if __name__ == "__main__":
    main()

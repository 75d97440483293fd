"""Seconds of whole training steps of small recipes, with the fused kernels and without them.

    .venv/bin/python scripts/bench/end_to_end.py [--steps 8] [--rounds 2] [--threads 1] [--recipes A,B] [--runs FOLDER]

The runs alternate between kernels.backend=cpu and kernels.backend=torch. They start from weights of a short warm start,
which is trained once, because time is measured here and not learning. Steps of the tabletop have a quarter of the
recipe's episodes. Prints a Markdown table: median seconds of a step and of its update over all rounds, and the largest
difference of the loss at the first step, whose rollouts are the same.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench import recipes  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
BACKENDS = ("cpu", "torch")
SHORT = {  # of the warm start, and of the recipe
    "visual_qa_digits": (["steps=60", "evaluation.prompts=1"], []),
    "image_digits_flow": (["steps=200", "evaluation.prompts=10"], []),
    "manipulation_tabletop": (
        ["steps=250", "rollout.prompts=64", "task.demonstrations.episodes=200", "evaluation.prompts=1"],
        ["rollout.prompts=8"],
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--recipes", default=",".join(SHORT))
    parser.add_argument("--runs", type=Path, default=ROOT / "build/end_to_end")
    options = parser.parse_args()
    print("| recipe | step: kernels, torch | update: kernels, torch | loss apart |\n" + "|" + " --- |" * 4)
    for recipe in options.recipes.split(","):
        base = options.runs / f"{recipe}-base"
        if not (base / "final").is_dir():
            train(warm_start(recipe), base, options.threads, *SHORT[recipe][0], "evaluation.every=0")
        found: dict[str, list[dict[str, Any]]] = {backend: [] for backend in BACKENDS}
        for _ in range(options.rounds):
            for backend in BACKENDS:
                found[backend] += steps(recipe, base, backend, options)
        apart = max(abs(a["loss"] - b["loss"]) for a, b in zip(*found.values(), strict=True) if a["step"] == 1)
        cells = [", ".join(f"{median(found[b], f'time/{part}'):.3f}" for b in BACKENDS) for part in ("step", "update")]
        print(f"| `{recipe}` | {cells[0]} | {cells[1]} | {apart:.0e} |", flush=True)


def warm_start(recipe: str) -> str:
    import yaml

    return Path(yaml.safe_load(recipes.file(recipe).read_text())["model"]["warm_start"]).stem


def steps(recipe: str, base: Path, backend: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    run = options.runs / f"{recipe}-{backend}"
    shutil.rmtree(run, ignore_errors=True)
    own = ["model.warm_start=null", f"model.path={base / 'final'}", f"kernels.backend={backend}"]
    own += [*SHORT[recipe][1], f"steps={options.steps}", "evaluation.before=false", "evaluation.prompts=1"]
    train(recipe, run, options.threads, *own)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "loss" in row]


def train(config: str, run: Path, threads: int, *overrides: str) -> None:
    command = [sys.executable, "-m", "mmrl", *recipes.command(config), f"run_dir={run}", f"threads={threads}"]
    subprocess.run([*command, *overrides], cwd=ROOT, check=True, stdout=sys.stderr)


def median(rows: list[dict[str, Any]], name: str) -> float:
    return statistics.median(row[name] for row in rows if row["step"] > 2)  # the first ones warm up


if __name__ == "__main__":
    main()

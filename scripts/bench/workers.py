"""Steps per second with rollouts by the training process, by a worker process, and by a worker one batch ahead.

    .venv/bin/python scripts/bench/workers.py [--parts images,robots] [--rounds 3] [--steps 8] [KEY=VALUE ...]

images    Flow-GRPO on handwritten digits with an untrained tiny Stable Diffusion 3: 4 prompts x 6 images of 10 steps
robots    GRPO with a small network in a simulator that only waits, --wait seconds for each observation, as if its work
          were done on another device: 4 start states x 8 episodes of 8 observations

KEY=VALUE: further overrides of every run. Each round measures the three in turn, each in new processes. Prints a
Markdown table: seconds of a step, the median of all rounds (smallest .. greatest median of a round), without the first
two steps; of these the seconds that the trainer spends on rollouts or waits for them, on the update, and on sending
weights; and steps per second relative to those without a worker. On one core, or two busy ones, a worker only costs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench import recipes  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
ARMS = {
    "none": [],
    "one worker": ["rollout.workers.count=1"],
    "one worker, ahead": ["rollout.workers.count=1", "rollout.workers.async_steps=1"],
}
QUIET = ["threads=1", "evaluation.every=0", "evaluation.before=false", "evaluation.prompts=1", "checkpoint.best=false"]
IMAGES = ["model.build=mmrl.tasks.image_generation.tiny.pipeline:build_digits", "rollout.prompts=4"]
IMAGES += ["rollout.group_size=6", "engine.micro_batch=24"]
ROBOTS = ["model.build=mmrl.tasks.manipulation.tiny_model:build_small", "rollout.prompts=4", "task.tasks=[pretend]"]
ROBOTS += ["task.simulator=scripts.bench.pretend_simulator:PretendSimulator", "action.horizon=40"]
PARTS = {"images": ("image_digits_flow", IMAGES), "robots": ("manipulation_tabletop", ROBOTS)}
TIMES = ("step", "rollout", "update", "synchronise")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--wait", type=float, default=0.2)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    print("| rollouts | workers | s a step | rollout | update | weights | steps a second |\n|" + " --- |" * 7)
    for part in options.parts.split(","):
        config, own = PARTS[part]
        own = own if part == "images" else [*own, f"task.options={{wait: {options.wait}}}"]
        found: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
        for _ in range(options.rounds):
            for arm, more in ARMS.items():
                given = [f"steps={options.steps}", *QUIET, *own, *more, *options.overrides]
                found[arm].append(measured(config, given))
        for arm in ARMS:
            print("| " + " | ".join([part, arm, *cells(found[arm], found["none"])]) + " |", flush=True)


def measured(config: str, overrides: list[str]) -> dict[str, float]:
    """Median seconds of a step and of its parts."""
    with tempfile.TemporaryDirectory(prefix="mmrl-workers-") as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "mmrl", *recipes.command(config), f"run_dir={run}"]
        command += ["model.warm_start=null", *overrides]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=sys.stderr)
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row][2:]
    return {name: statistics.median(row.get(f"time/{name}", 0.0) for row in steps) for name in TIMES}


def cells(found: list[dict[str, float]], without: list[dict[str, float]]) -> list[str]:
    def told(name: str) -> str:
        values = [one[name] for one in found]
        return f"{statistics.median(values):.2f} ({min(values):.2f} .. {max(values):.2f})"

    ratios = [none["step"] / one["step"] for none, one in zip(without, found, strict=True)]
    return [*map(told, TIMES), f"{statistics.median(ratios):.2f} ({min(ratios):.2f} .. {max(ratios):.2f})"]


if __name__ == "__main__":
    main()

"""Soft actor-critic beside PPO on Gymnasium's Pendulum: the return by the number of environment steps.

    .venv/bin/python scripts/bench/off_policy.py [--seeds 3] [--first 0] [--runs runs/off_policy] [--only ARM]

sac      configs/vla/gymnasium_pendulum_sac.yaml: 800 environment steps a training step
ppo      PPO on the same network size, 4,000 environment steps a training step, 25 training steps
control  as sac, with a learning rate of the policy of 1e-12

Settings were selected on seed 9. A random policy has a return of about -1,200, a good one of -150. Runs that exist
already are not repeated. Prints a Markdown table: the held-out return of 50 starts before and after training, and the
environment steps until the mean return of a training step is at least -250.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

GOOD = -250.0
PPO = [
    "action.head={type: gaussian, width: 64, layers: 2, std: 0.6}",
    "rollout={prompts: 20, extras: []}",
    "task.rows=20",
    "algorithm={type: ppo, gamma: 0.95, lam: 0.95, simulator_reward: 0.1, critic: separate, shuffle: steps, "
    "standardise: minibatch, epochs: 10, minibatches: 20}",
    "engine.micro_batch=200",
    "steps=25",
]
ARMS = {"sac": [], "ppo": PPO, "control": ["optim.lr=1e-12"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--runs", type=Path, default=Path("runs/off_policy"), help="folder of the runs")
    parser.add_argument("--only", choices=list(ARMS), help="train this arm alone")
    options = parser.parse_args()
    print("| arm | seed | return before | return after | environment steps | steps until -250 | minutes |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for arm in [options.only] if options.only else ARMS:
        for seed in range(options.first, options.first + options.seeds):
            print("| " + " | ".join([arm, str(seed), *numbers(options.runs, arm, seed)]) + " |", flush=True)


def numbers(runs: Path, arm: str, seed: int) -> list[str]:
    """Trains an arm, unless that was done before. Returns the cells of its row."""
    folder = runs / f"{arm}_{seed}"
    if not (folder / "final").is_dir():
        train(folder, arm, seed)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    before, *_, after = [row["evaluation/episode/return"] for row in rows if "evaluation/episode/return" in row]
    trained = [row for row in rows if "loss" in row]
    episodes = 20 if arm == "ppo" else 4
    steps = 200 * episodes * len(trained)
    good = next((row["step"] for row in trained if row["episode/return"] >= GOOD), None)
    until = "not reached" if good is None else f"{200 * episodes * good:,}"
    minutes = sum(row["time/step"] for row in trained) / 60
    return [f"{before:.0f}", f"{after:.0f}", f"{steps:,}", until, f"{minutes:.1f}"]


def train(folder: Path, arm: str, seed: int) -> None:
    settings = [f"run_dir={folder}", f"seed={seed}", "threads=1", "checkpoint={every: 0, best: false}"]
    command = [sys.executable, "-m", "mmrl", "train", "gymnasium_pendulum_sac", *settings, *ARMS[arm]]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()

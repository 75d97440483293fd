"""Learning from recorded episodes of the tabletop, failures too: imitation beside imitation weighted by advantages.

    .venv/bin/python scripts/bench/offline_robots.py [--seeds 3] [--first 0] [--task lift] [--steps 800]
        [--runs runs/offline] [--only ARM]

A scripted expert records 300 episodes; Gaussian noise on every action (0.2) and now and then five random actions (at
3 % of the actions) make some of them fail, and what was executed is what is shown. Each arm takes as many batches of
the same episodes, and plays 200 held-out starts with its likeliest actions:

clone       all episodes alike
successes   the successful ones alone
weighted    all, exp(A / 0.1) with A the return less what a critic learned to expect
binary      all whose return exceeds that, alike
conditioned all, under a prompt that says whether A is among the largest 30 % (played under the good label)
q_learning  as weighted, with A = Q - V of Q networks that learn from the same steps (IQL)
control     as weighted, with weights that are equal to a thousandth (temperature 1000)

Settings were chosen with --first 9 --seeds 1. Runs that are there already are not repeated. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from mmrl.report.intervals import wilson

RETURNS = "returns: {gamma: 0.97}"
ARMS = {
    "clone": [],
    "successes": ["task.demonstrations.successful=true"],
    "weighted": [f"algorithm={{type: advantage_weighted, {RETURNS}, weights: {{temperature: 0.1}}}}"],
    "binary": [f"algorithm={{type: advantage_weighted, {RETURNS}, weights: {{form: binary}}}}"],
    "conditioned": [
        f"algorithm={{type: advantage_conditioned, {RETURNS}}}",
        "action.labels={}",
        "model.build=mmrl.tasks.manipulation.tiny_model:build_labelled",
    ],
    "q_learning": [
        f"algorithm={{type: implicit_q_learning, {RETURNS}, weights: {{temperature: 0.1}}, "
        "q: {lr: 1e-3, updates: 4, tau: 0.02}}"
    ],
    "control": [f"algorithm={{type: advantage_weighted, {RETURNS}, weights: {{temperature: 1000}}}}"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--task", default="lift", choices=["lift", "push"])
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--episodes", type=int, default=300)
    parser.add_argument("--runs", type=Path, default=Path("runs/offline"))
    parser.add_argument("--only", choices=list(ARMS))
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.seeds)
    print("| arm | " + " | ".join(f"seed {seed}" for seed in seeds) + " | mean |")
    print("| --- |" + " --- |" * (len(seeds) + 1))
    for arm in [options.only] if options.only else ARMS:
        solved = [success(options, arm, seed) for seed in seeds]
        cells = [f"{s / n:.3f} ({low:.2f} .. {high:.2f})" for s, n in solved for low, high in [wilson(s, n)]]
        print(f"| {arm} | {' | '.join(cells)} | {sum(s / n for s, n in solved) / len(solved):.3f} |", flush=True)


def success(options: argparse.Namespace, arm: str, seed: int) -> tuple[int, int]:
    """Trains an arm, unless that was done before. Returns its successes and the number of held-out starts."""
    folder = options.runs / f"{options.task}_{options.steps}" / f"{arm}_{seed}"
    if not (folder / "final").is_dir():
        train(folder, options, arm, seed)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rate = [row["evaluation/accuracy"] for row in rows if "evaluation/accuracy" in row][-1]
    return round(200 * rate), 200


def train(folder: Path, options: argparse.Namespace, arm: str, seed: int) -> None:
    settings = [
        f"run_dir={folder}",
        f"seed={seed}",
        f"steps={options.steps}",
        "threads=1",
        f"task.tasks=[{options.task}]",
        "task.options={control: position, privileged: true, objects: 2}",
        f"task.demonstrations={{type: expert, episodes: {options.episodes}, noise: 0.2, perturbation: 0.03, "
        "successful: false, actions: executed}",
        "action.head={type: gaussian, std: 0.3}",
        "action.chunk=2",
        "action.standardise=true",
        "optim.lr=1e-3",
        "evaluation={every: 0, prompts: 200, before: false}",
        "checkpoint={every: 0, best: false}",
    ]
    command = [sys.executable, "-m", "mmrl", "train", "manipulation_tabletop_warm_start", *settings, *ARMS[arm]]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()

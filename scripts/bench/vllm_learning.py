"""The quickstart's recipe with each generator, from the same base for each seed: does it learn the same, and how fast?

    .venv/bin/python scripts/bench/vllm_learning.py [--seeds 3] [--arms server,ahead] [KEY=VALUE ...]

    transformers   the trained model itself samples
    colocated      vLLM in the training process
    server         one vLLM server in a process of its own
    ahead          the same server samples the next batch during the update

KEY=VALUE: further overrides of every run. Runs that exist in --runs are not repeated. Prints a Markdown table: accuracy
of greedy responses to held-out questions, median seconds of a step and of its parts, and the largest mean difference of
log-probabilities between generator and trained model (with `ahead` the rollouts are one update old).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench import recipes  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
CONFIG = "visual_qa_digits"
CACHE = "rollout.generator.cache_gib=0.5"
SERVER = ["rollout.generator.type=vllm_server", CACHE]
ARMS = {
    "transformers": [],
    "colocated": ["rollout.generator.type=vllm_colocated", CACHE],
    "server": SERVER,
    "ahead": [*SERVER, "rollout.generator.async_steps=1"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--runs", type=Path, default=ROOT / "build/vllm")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    print(
        "| generation | seed | before | after | s a step | rollout | update | synchronise | logp gap |\n|"
        + " --- |" * 9
    )
    for seed in range(options.seeds):
        base = options.runs / f"base-{seed}"
        train(f"{CONFIG}_warm_start", base, seed, options.threads)
        for arm in options.arms.split(","):
            run = options.runs / f"{arm}-{seed}"
            own = ["model.warm_start=null", f"model.path={base / 'final'}", f"steps={options.steps}", *ARMS[arm]]
            train(CONFIG, run, seed, options.threads, *own, *options.overrides)
            print("| " + " | ".join([arm, str(seed), *cells(rows(run))]) + " |", flush=True)


def train(config: str, run: Path, seed: int, threads: int, *overrides: str) -> None:
    if not (run / "final").is_dir():
        command = [sys.executable, "-m", "mmrl", *recipes.command(config), f"seed={seed}", f"run_dir={run}"]
        subprocess.run([*command, f"threads={threads}", *overrides], cwd=ROOT, check=True, stdout=sys.stderr)


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def cells(found: list[dict[str, Any]]) -> list[str]:
    accuracies = [row["evaluation/accuracy"] for row in found if "evaluation/accuracy" in row]
    steps = [row for row in found if "loss" in row][2:]  # the first ones warm up

    def median(name: str) -> str:
        values = [row[name] for row in steps if name in row]
        return f"{statistics.median(values):.2f}" if values else "-"

    gaps = [row["correction/logp_gap"] for row in steps if "correction/logp_gap" in row]
    times = [median(f"time/{name}") for name in ("step", "rollout", "update", "synchronise")]
    return [f"{accuracies[0]:.3f}", f"{accuracies[-1]:.3f}", *times, f"{max(gaps):.1e}" if gaps else "-"]


if __name__ == "__main__":
    main()

"""Recipes for image generation and token diffusion with several seeds: gain, cost, and metrics of reward hacking.

    .venv/bin/python scripts/bench/generators.py [--seeds 3] [--only PATTERN] [--runs FOLDER] [KEY=VALUE ...]

KEY=VALUE: further overrides of every run. Runs that exist in --runs are not repeated. Recipes of the same model start
from the same weights. Each run uses one thread. Prints a Markdown table. Accuracy after training is the mean over the
seeds (smallest .. greatest). The gain has a 95 % interval, for the difference of two shares. Seconds are CPU time of a
whole run, with start-up and evaluations; other work on the machine changes them little.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.image_digits import ROOT, SPENT, evaluations, finished, mean, spread  # noqa: E402

WEAK = "model.warm_start=image_digits_weak_base"  # the base that the recipes of preferences have
CHAINS = ("perceptron", "dance", "cps", "window", "branch", "nft", "awm", "perceptron_control")
RECIPES = (
    *(f"image_digits_{name}" for name in CHAINS),
    "text_sums_masked",
    "text_sums_masked_control",
    "text_sums_masked_dmpo",
    "text_sums_masked_tilt",
    "text_sums_uniform",
    "text_sums_uniform_control",
    "image_digits_masked",
    "image_digits_masked_control",
    "image_digits_autoregressive",
    "image_digits_autoregressive_control",
    "image_digits_reasoning",
    "image_digits_reasoning_control",
    "image_digits_dpo",
    "image_digits_dpo_control",
    "image_digits_dpo_offline",
    "image_digits_reward_gradient",
    "image_digits_steps",
    "image_digits_steps_control",
    "image_digits_few_step",
    "image_digits_rewritten",
    "image_digits_rewritten_control",
    "prompt_rewriting_digits",
    "prompt_rewriting_digits_control",
)
GUARDS = ("second_scorer", "sharpness", "diversity")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="recipes whose name begins with a match of this regular expression")
    parser.add_argument("--runs", type=Path, default=ROOT / "build" / "generators")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    heads = ["recipe", "before", "after", "gain (95 %)", "seconds", *(f"{guard} before, after" for guard in GUARDS)]
    print(f"| {' | '.join(heads)} |\n|{' --- |' * len(heads)}")
    for name in RECIPES:
        if re.match(options.only, name):
            print(f"| {' | '.join(row(name, options.seeds, options.runs, options.overrides))} |", flush=True)


def row(name: str, seeds: int, folder: Path, overrides: list[str]) -> list[str]:
    own = [WEAK] if name.removeprefix("image_digits_") in CHAINS else []
    folders = [folder / f"{name}-{seed}" for seed in range(seeds)]
    runs = [finished(name, one, seed, *own, *overrides) for seed, one in enumerate(folders)]
    ends = [[evaluations(run)[place] for run in runs] for place in (0, -1)]
    before, after = (sum(e["evaluation/accuracy"] for e in end) / seeds for end in ends)
    count = ends[0][0]["evaluation/n"]
    wide = 1.96 * math.sqrt((before * (1 - before) + after * (1 - after)) / count)
    guards = [
        f"{mean(runs, f'guard/{g}', 0)}, {mean(runs, f'guard/{g}', -1)}"
        if f"evaluation/guard/{g}" in ends[0][0]
        else "-"
        for g in GUARDS
    ]
    spent = [float((one / SPENT).read_text()) for one in folders]
    accuracies = spread([e["evaluation/accuracy"] for e in ends[1]])
    gain = f"{after - before:+.3f} ({after - before - wide:+.3f} .. {after - before + wide:+.3f})"
    return [name, f"{before:.3f}", accuracies, gain, spread(spent, digits=0), *guards]


if __name__ == "__main__":
    main()

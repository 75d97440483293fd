"""Compares runs of the same job: are their weights equal bit for bit, or up to rounding? Prints a Markdown table.

    python scripts/attack/determinism.py

Each row trains a tiny job for four steps as the first run did, but with one change, and compares the final weights of
both runs: the number is the largest difference of any weight. The row with another seed shows how large it can be.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
JOBS = {
    "tokens": ("tests/whole_runs/tiny.yaml",),
    "denoising": ("tests/whole_runs/tiny_images.yaml",),
    "actions": ("tests/whole_runs/tiny_robots.yaml", "task.train_size=6"),  # near the goal: there is something to learn
}
CONDITIONS: dict[str, tuple[str, ...]] = {
    "the same command again": (),
    "killed after two steps, and resumed": ("RESUME",),
    "two threads": ("threads=2",),
    "micro-batches of half the size": ("engine.micro_batch=2",),
    "ZeRO stage 0": ("engine.zero_stage=0",),
    "ZeRO stage 3": ("engine.zero_stage=3",),
    "two ranks": ("RANKS",),
    "engine.deterministic=true": ("engine.deterministic=true",),
    "kernels.backend=torch": ("kernels.backend=torch",),
    "another seed": ("seed=1",),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="run one kind of job only: tokens, denoising or actions")
    only = parser.parse_args().only
    kinds = [kind for kind in JOBS if only in kind]
    print(f"| the second run has | {' | '.join(kinds)} |\n| --- |{' --- |' * len(kinds)}", flush=True)
    with tempfile.TemporaryDirectory(prefix="mmrl-determinism-") as folder:
        first = {kind: trained(Path(folder), kind, "first", ()) for kind in kinds}
        none = {kind: trained(Path(folder), kind, "no_rate", ("optim.lr=1e-30",)) for kind in kinds}
        print(f"| no learning rate | {' | '.join(told(first[kind], none[kind]) for kind in kinds)} |", flush=True)
        for name, options in CONDITIONS.items():
            second = {kind: trained(Path(folder), kind, name.replace(" ", "_"), options) for kind in kinds}
            print(f"| {name} | {' | '.join(told(first[kind], second[kind]) for kind in kinds)} |", flush=True)


def trained(folder: Path, kind: str, name: str, options: tuple[str, ...]) -> dict[str, torch.Tensor] | str:
    """Returns the weights of a run, or why there are none."""
    run = folder / kind / name
    settings = [option for option in options if "=" in option]
    sizes = ["engine.micro_batch=4", "checkpoint.every=1", "checkpoint.keep=9", f"run_dir={run}", *settings]
    base, *usual = JOBS[kind]
    command = [sys.executable, "-m", "mmrl", "train", str(ROOT / base), *usual, *sizes]
    if "RANKS" in options:
        command[1:2] = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "-m"]
    steps = ["steps=2", "steps=4"] if "RESUME" in options else ["steps=4"]
    for step in steps:
        done = subprocess.run(
            [*command, step], capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        if done.returncode:
            return (done.stderr.strip() or done.stdout.strip()).splitlines()[-1][-80:]
    return load_file(run / "final/model.safetensors")


def told(first: dict[str, torch.Tensor] | str, second: dict[str, torch.Tensor] | str) -> str:
    if isinstance(first, str) or isinstance(second, str):
        return f"refused: {second if isinstance(second, str) else first}"
    away = max(float((first[name].double() - second[name].double()).abs().max()) for name in first)
    return "to the bit" if away == 0 else f"{away:.1e}"


if __name__ == "__main__":
    main()

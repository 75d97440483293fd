"""Run directories that are written by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import yaml

CONFIG: dict[str, Any] = {
    "run_dir": "runs/made",
    "seed": 7,
    "steps": 40,
    "model": {"type": "vision_language", "path": "a/model", "dtype": "float32"},
    "task": {"type": "visual_qa", "data": {"type": "digits"}},
    "rollout": {"prompts": 8, "group_size": 4},
    "algorithm": {"type": "grpo", "epochs": 1, "minibatches": 1},
    "optim": {"lr": 0.001},
}


def healthy(steps: int = 40) -> list[dict[str, Any]]:
    """Rows of a run in which nothing is wrong: a reward that rises, and numbers that jitter about what is usual."""
    rows = []
    for step in range(1, steps + 1):
        jitter = math.sin(3.0 * step)
        row = {
            "step": step,
            "time": 1000.0 + step,
            "reward/exact_match": 0.2 + 0.01 * step + 0.02 * jitter,
            "unscored": 0.0,
            "unscored/exact_match": 0.0,
            "accuracy": 0.2 + 0.01 * step,
            "loss": 0.01 * jitter,
            "grad_norm": 1.5 + 0.3 * jitter,
            "updates_skipped": 0.0,
            "entropy": 0.8 - 0.005 * step,
            "advantages/zero_variance_groups": 0.3 + 0.1 * jitter,
            "surrogate/ratio_gap": 0.0,
            "surrogate/ratio_gap_max": 0.0,
            "surrogate/clip_low": 0.01,
            "surrogate/clip_high": 0.01,
            "response/truncated": 0.0,
            "guard/out_of_gamut": 0.3 + 0.02 * jitter,
            "guard/second_scorer": -4.0 + 0.01 * step,
            "guard/diversity": 0.4,
            "generation/staleness": 0.0,
            "generation/probe_gap": 1e-7,
            "generation/probe_limit": 1e-3,
            "correction/logp_gap": 1e-4,
            "correction/effective_sample_size": 0.98,
            "time/rollout": 0.2,
            "time/update": 0.3,
            "time/step": 0.55,
            "time/rollout_max": 0.21,
            "time/rollout_median": 0.2,
            "time/rollout_slowest": float(step % 2),
            "throughput/rollouts_per_second": 58.0,
        }
        rows.append(row)
    return rows


def evaluations(*accuracies: tuple[int, float]) -> list[dict[str, Any]]:
    return [
        {
            "step": step,
            "time": 1000.0 + step,
            "evaluation/accuracy": value,
            "evaluation/n": 400.0,
            "evaluation/unscored": 0.0,
            "evaluation/standard_error": 0.02,
        }
        for step, value in accuracies
    ]


def write_run(
    folder: Path,
    rows: list[dict[str, Any]],
    held_out: list[dict[str, Any]] | None = None,
    config: dict[str, Any] | None = None,
    end: tuple[str, str] | None = ("finished", "It reached its end, step 40."),
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG if config is None else config))
    (folder / "versions.json").write_text(json.dumps({"torch": "2.13.0", "commit": "d11f3dda" * 5}))
    held_out = evaluations((0, 0.2), (40, 0.6)) if held_out is None else held_out
    lines = sorted([*rows, *held_out], key=lambda row: row["step"])
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if end is not None:
        (folder / "end.json").write_text(json.dumps({"state": end[0], "sentence": end[1]}))
    return folder

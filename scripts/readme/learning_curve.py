"""Draw the learning curves of runs: .venv/bin/python scripts/readme/learning_curve.py OUT.png RUN [RUN ...]"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def main(target: str, runs: list[str]) -> None:
    figure, axis = plt.subplots(figsize=(7, 3.2), dpi=110)
    for run in map(Path, runs):
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        points = [(r["step"], r["evaluation/accuracy"]) for r in rows if "evaluation/accuracy" in r]
        axis.plot(*zip(*points, strict=True), marker="o", label=run.name)
    axis.set(xlabel="step", ylabel="held-out accuracy", ylim=(0, 1))
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(target)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])

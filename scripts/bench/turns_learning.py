"""What `scripts/bench/turns.py --learning` does: trains recipes with several turns and their controls, with several
seeds.

Rows of zoom: `zoom`, the recipe; `no_tool`, the same number of supervised steps and of GRPO steps without the tool;
`control`, random rewards; `unrelated`, whose tool shows another part of the image; `turns` (MT-GRPO's reward of the
tool), `replay` (ARPO), `ppo` and `papo`, other methods from the same base, each with its control. Rows of still_life:
`zoom` and its `control`. Rows of games: `cards` and its `control`. Each seed trains its own base. Runs that exist in
--runs are not repeated; one that was interrupted starts again.

Prints the percentage of held-out questions answered right, with responses sampled at temperature 1 and with the most
likely ones, before and after RL. `tool` and `place` are the shares of sampled conversations that use the tool, and that
zoom to the right place. Minutes are wall-clock, with evaluations and warm start. The last table has means (smallest ..
greatest) over the seeds; for zoom also the difference to the best of the four values of `no_tool` with the same seed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench import recipes  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
METHODS = ("turns", "replay", "ppo", "papo")
STILL_LIFE_BASES = ("visual_qa_zoom_still_life_warm_start", "visual_qa_zoom_still_life_first_warm_start")
GAMES_BASES = ("visual_games_warm_start", "visual_games_second_warm_start", "visual_games_first_warm_start")
# Of each recipe its rows: the configuration, the one of its warm start, and what that starts from, to the first.
RECIPES: dict[str, dict[str, tuple[str, ...]]] = {
    "zoom": {
        "zoom": ("visual_qa_zoom", "visual_qa_zoom_warm_start"),
        "no_tool": ("visual_qa_zoom_no_tool", "visual_qa_zoom_no_tool_warm_start"),
        "control": ("visual_qa_zoom_control", "visual_qa_zoom_warm_start"),
        "unrelated": ("visual_qa_zoom_unrelated", "visual_qa_zoom_warm_start"),
        **{row: (f"visual_qa_zoom_{row}", "visual_qa_zoom_warm_start") for row in METHODS},
        **{f"{row}_control": (f"visual_qa_zoom_{row}_control", "visual_qa_zoom_warm_start") for row in METHODS},
    },
    "still_life": {
        "zoom": ("visual_qa_zoom_still_life", *STILL_LIFE_BASES),
        "control": ("visual_qa_zoom_still_life_control", *STILL_LIFE_BASES),
    },
    "games": {
        "cards": ("visual_games", *GAMES_BASES),
        "control": ("visual_games_control", *GAMES_BASES),
    },
}
HELD_OUT = 500
SHARES = ("sampled before", "sampled after", "likeliest before", "likeliest after", "tool", "place")


@dataclass(frozen=True)
class Learned:
    """One row at one seed. shares: by `SHARES`, in percent; None where there is no such thing."""

    row: str
    seed: int
    shares: dict[str, float | None]
    minutes: float

    @property
    def after(self) -> float:
        """Of sampled responses after RL."""
        share = self.shares["sampled after"]
        assert share is not None
        return share

    @property
    def best(self) -> float:
        """The greatest share of right answers that was seen."""
        return max(share for name, share in self.shares.items() if share is not None and name in SHARES[:4])


def table(recipe: str, rows: Sequence[str], seeds: Sequence[int], runs: Path, overrides: Sequence[str]) -> None:
    """Makes what is missing and prints."""
    found = []
    print(f"| row | seed | {' | '.join(SHARES)} | minutes |\n|{' --- |' * (len(SHARES) + 3)}", flush=True)
    for seed in seeds:
        for row in rows:
            found.append(learned(recipe, row, seed, runs, overrides))
            cells = [row, str(seed), *(told([found[-1].shares[name]]) for name in SHARES)]
            print(f"| {' | '.join(cells)} | {found[-1].minutes:.1f} |", flush=True)
    print(f"\n| row | {' | '.join(SHARES)} | above the best without a tool |\n|{' --- |' * (len(SHARES) + 2)}")
    without = {one.seed: one.best for one in found if one.row == "no_tool"}
    for row in rows:
        own = [one for one in found if one.row == row]
        shares = [told([one.shares[name] for one in own]) for name in SHARES]
        above = told([one.after - without[one.seed] for one in own]) if without else "-"
        print(f"| {' | '.join([row, *shares, above])} |")


def told(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    middle = f"{sum(known) / len(known):.1f}"
    return middle if len(known) == 1 else f"{middle} ({min(known):.1f} .. {max(known):.1f})"


def learned(recipe: str, row: str, seed: int, runs: Path, overrides: Sequence[str]) -> Learned:
    config, *bases = RECIPES[recipe][row]
    minutes, origin, base = 0.0, list[str](), runs
    for name in reversed(bases):
        base = runs / f"{name}-{seed}"
        minutes += train(name, base, seed, *origin, *overrides)
        origin = ["model.warm_start=null", f"model.path={base / 'final'}"]
    run, sampling = runs / f"{config}-{seed}", [f"evaluation.prompts={HELD_OUT}", "evaluation.temperature=1.0"]
    minutes += train(config, run, seed, *origin, *sampling, *overrides)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    ends = [line for line in lines if "evaluation/accuracy" in line]
    before, after = ends[0], ends[-1]
    shares = {
        "sampled before": before["evaluation/accuracy"],
        "sampled after": after["evaluation/accuracy"],
        "likeliest before": likeliest(config, base / "final", run / "before.json", seed, *overrides),
        "likeliest after": likeliest(config, run / "final", run / "after.json", seed, *overrides),
        "tool": after.get("evaluation/turns/tool_share"),
        "place": after.get("evaluation/turns/zoomed_right"),
    }
    return Learned(row, seed, {name: None if s is None else 100 * s for name, s in shares.items()}, minutes)


def train(config: str, run: Path, seed: int, *overrides: str) -> float:
    """Unless that was done before; returns its minutes."""
    if not (run / "seconds").is_file():
        shutil.rmtree(run, ignore_errors=True)
        started = time.monotonic()
        mmrl(*recipes.command(config), f"seed={seed}", f"run_dir={run}", *overrides)
        shutil.rmtree(run / "checkpoints", ignore_errors=True)
        (run / "seconds").write_text(str(time.monotonic() - started))
    return float((run / "seconds").read_text()) / 60


def likeliest(config: str, model: Path, kept: Path, seed: int, *overrides: str) -> float:
    """The share of held-out prompts whose likeliest responses are right, from the result file of `mmrl eval`."""
    if not kept.is_file():
        asked = [f"seed={seed}", f"evaluation.prompts={HELD_OUT}", "evaluation.temperature=0"]
        mmrl("eval", str(model), str(recipes.file(config)), *overrides, *asked)
        shutil.move(model / "evaluation.json", kept)
    return json.loads(kept.read_text())["evaluation/accuracy"]


def mmrl(*arguments: str) -> None:
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    command: list[Any] = [sys.executable, "-m", "mmrl", *arguments]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=sys.stderr)

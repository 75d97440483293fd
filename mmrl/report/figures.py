"""Curves of one or several runs, as templates/chart.js draws them: plain mappings, whose numbers are those of
metrics.jsonl."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from mmrl.report.records import RunRecord, Series

POINTS = 2000  # of a curve: more steps are thinned out evenly, the last one always stays
COLOURS = ("#4269d0", "#d1671b", "#2f9e44", "#c2368f", "#7b4fd0", "#0f8b8d", "#a3752d", "#d64545")
DASHES = ("solid", "dot", "dash", "dashdot")
WIDE = 1.96  # standard errors on either side make an interval of 95 %

LEARNING, GUARDED, TIMES = "Learning", "Rewards, and the guards beside them", "Time and memory"
HEADINGS: dict[str, tuple[str, ...]] = {  # and how the names of their metrics begin
    LEARNING: ("accuracy", "evaluation/accuracy", "evaluation/standard_error", "evaluation/n"),
    GUARDED: ("reward/", "guard/"),
    "Held-out measures": ("evaluation/",),
    "Optimisation": (
        "loss",
        "grad_norm",
        "entropy",
        "kl",
        "lr",
        "surrogate/",
        "advantages/",
        "unscored",
        "updates_skipped",
    ),
    TIMES: ("time/", "throughput/", "memory/"),
    "Responses, episodes, engines and others": ("",),
}
TOGETHER = {"accuracy", "evaluation/accuracy", "evaluation/standard_error", "evaluation/n"}  # in one figure


@dataclass(frozen=True)
class FigureGroup:
    """A heading, and the figures below it."""

    title: str
    figures: list[dict[str, Any]]


def groups(runs: Sequence[RunRecord]) -> list[FigureGroup]:
    """All metrics of the runs, each in one figure under the first heading that has a beginning of its name."""
    named: dict[str, list[str]] = {title: [] for title in HEADINGS}
    for name in dict.fromkeys(name for run in runs for name in run.names):
        title = next(title for title, beginnings in HEADINGS.items() if name.startswith(beginnings))
        if name not in TOGETHER:
            named[title].append(name)
    named[GUARDED] = beside(named[GUARDED])
    found = {title: [curve(runs, name) for name in names] for title, names in named.items()}
    found[LEARNING][:0] = accuracy(runs)
    found[TIMES][:0] = phases(runs)
    return [FigureGroup(title, figures) for title, figures in found.items() if figures]


def beside(names: Sequence[str]) -> list[str]:
    """Rewards and guards in turn, so that they stand beside one another."""
    rewards = [name for name in names if name.startswith("reward/")]
    others = [name for name in names if not name.startswith("reward/")]
    pairs = zip_longest(rewards, others)
    return [name for pair in pairs for name in pair if name is not None]


def curve(runs: Sequence[RunRecord], name: str) -> dict[str, Any]:
    """One metric of all runs over steps."""
    return figure(name, [line(run.series(name), run, number) for number, run in enumerate(runs)])


def accuracy(runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Accuracy on training prompts as a thin line, and on held-out prompts as points with their 95 % intervals."""
    lines = []
    for number, run in enumerate(runs):
        if len(own := run.series("accuracy")):
            lines.append(line(own, run, number, label="training prompts", opacity=0.45, width=1))
        held_out, errors = run.series("evaluation/accuracy"), run.series("evaluation/standard_error")
        if len(held_out):
            by_step = dict(zip(errors.steps, errors.values, strict=True))
            spread = [clean(WIDE * by_step.get(step, math.nan)) for step in held_out.steps]
            lines.append(line(held_out, run, number, label="held out", markers=True) | {"errors": spread})
    return [figure("accuracy (95 % intervals on held-out prompts)", lines, wide=True)] if lines else []


def phases(runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Mean seconds of a step by phase, a bar a run."""
    spent = [shares(run) for run in runs]
    if not any(any(parts.values()) for parts in spent):
        return []
    parts = [
        {"name": name, "values": [found[name] for found in spent], "color": COLOURS[(number + 3) % len(COLOURS)]}
        for number, name in enumerate(spent[0])
    ]
    made = figure("mean seconds of a step, by phase", [])
    return [made | {"bars": {"rows": [run.name for run in runs], "parts": parts}}]


def shares(run: RunRecord) -> dict[str, float]:
    """Mean seconds of a step in its phases."""
    found = {name: mean_of(run.series(f"time/{name}")) for name in ("rollout", "update")}
    found["the rest"] = max(0.0, mean_of(run.series("time/step")) - sum(found.values()))
    return found


def line(
    series: Series,
    run: RunRecord,
    number: int,
    *,
    label: str = "",
    markers: bool = False,
    opacity: float = 1.0,
    width: float = 1.8,
) -> dict[str, Any]:
    """A line of a series. Values that are not finite are gaps. run: which one it is of, for the legend."""
    kept = thinned(len(series))
    return {
        "name": f"{run.name} {label}".strip(),
        "x": [series.steps[i] for i in kept],
        "y": [clean(series.values[i]) for i in kept],
        "markers": markers or len(series) <= 2,
        "opacity": opacity,
        "color": COLOURS[number % len(COLOURS)],
        "width": width,
        "dash": DASHES[number // len(COLOURS) % len(DASHES)],
        "run": number,
        "metric": series.name,
    }


def figure(title: str, lines: Iterable[dict[str, Any]], *, wide: bool = False) -> dict[str, Any]:
    """Lines over steps below a title; wide: over the whole page. height: pixels."""
    return {"title": title, "lines": list(lines), "wide": wide, "height": 320 if wide else 230}


def thinned(count: int, most: int = POINTS) -> list[int]:
    """Which of `count` points are drawn: all, or evenly spaced ones of which the last is one."""
    if count <= most:
        return list(range(count))
    every = math.ceil(count / most)
    return sorted({*range(0, count, every), count - 1})


def clean(value: float) -> float | None:
    return value if math.isfinite(value) else None


def mean_of(series: Series) -> float:
    return sum(series.finite) / len(series.finite) if series.finite else 0.0

"""Builds the figures of one or several runs from metrics.jsonl, as the mappings that templates/chart.js draws."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from mmrl.report.html.explanations import explanation
from mmrl.report.records import RunRecord, Series

MAX_POINTS = 2000  # at most in a curve: more steps are thinned out evenly; the last one stays
COLORS = ("#4269d0", "#d1671b", "#2f9e44", "#c2368f", "#7b4fd0", "#0f8b8d", "#a3752d", "#d64545")
DASHES = ("solid", "dot", "dash", "dashdot")
Z_95 = 1.96  # standard errors on either side make an interval of 95 %

CONSTANT = "Metrics that did not change"  # of headings that have no figure
LEARNING, GUARDED, TIMES = "Learning", "Rewards, and the guards beside them", "Time and memory"
HEADINGS: dict[str, tuple[str, ...]] = {  # with prefixes of the metrics below each
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
ACCURACY_METRICS = {"accuracy", "evaluation/accuracy", "evaluation/standard_error", "evaluation/n"}  # in one figure


@dataclass(frozen=True)
class FigureGroup:
    """A heading with its figures. constants: metrics that never changed, which get no figure, with their value in each
    run."""

    title: str
    figures: list[dict[str, Any]]
    constants: dict[str, list[float | None]]


def groups(runs: Sequence[RunRecord]) -> list[FigureGroup]:
    """Returns the figures of all metrics of the runs. A metric is under the first heading that has a prefix of its
    name. Headings without a figure are left out, and their constant metrics are in a last group."""
    names_by_title: dict[str, list[str]] = {title: [] for title in HEADINGS}
    for name in dict.fromkeys(name for run in runs for name in run.names):
        title = next(title for title, prefixes in HEADINGS.items() if name.startswith(prefixes))
        if name not in ACCURACY_METRICS:
            names_by_title[title].append(name)
    names_by_title[GUARDED] = interleaved(names_by_title[GUARDED])
    constant_values = {
        name: constants(runs, name) for names in names_by_title.values() for name in names if is_constant(runs, name)
    }
    figures = {
        title: [curve(runs, name) for name in names if name not in constant_values]
        for title, names in names_by_title.items()
    }
    figures[LEARNING][:0] = accuracy(runs)
    figures[TIMES][:0] = phases(runs)
    constants_by_title = {
        title: {name: constant_values[name] for name in names if name in constant_values}
        for title, names in names_by_title.items()
    }
    shown = [FigureGroup(title, charts, constants_by_title[title]) for title, charts in figures.items() if charts]
    rest = {
        name: values for title in HEADINGS if not figures[title] for name, values in constants_by_title[title].items()
    }
    return [*shown, FigureGroup(CONSTANT, [], rest)] if rest else shown


def is_constant(runs: Sequence[RunRecord], name: str) -> bool:
    """Returns True if a metric has at least three values in one run, and in each run all its values are equal."""
    series = [run.series(name).values for run in runs]
    return max(map(len, series)) >= 3 and all(len(set(values)) <= 1 for values in series)


def constants(runs: Sequence[RunRecord], name: str) -> list[float | None]:
    """Returns the first value of a metric in each run; None if a run has none."""
    return [next(iter(run.series(name).values), None) for run in runs]


def axes(runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Returns for each run the hours since its first line, by step, and the rollouts of a step (None: unknown)."""
    return [{"hours": hours(run), "rollouts": rollouts(run)} for run in runs]


def hours(run: RunRecord) -> dict[int, float]:
    """Returns the hours since the first line of metrics, by step. The time between an interruption and its resumption
    is included."""
    times = {int(row["step"]): float(row["time"]) for row in [*run.evaluations, *run.rows] if "time" in row}
    first = min(times.values(), default=0.0)
    return {step: round((time - first) / 3600, 5) for step, time in sorted(times.items())}


def rollouts(run: RunRecord) -> int | None:
    prompts, size = run.key("rollout.prompts"), run.key("rollout.group_size", 1)
    return prompts * size if isinstance(prompts, int) and isinstance(size, int) else None


def interleaved(names: Sequence[str]) -> list[str]:
    """Returns names of rewards and guards alternately, so that their figures are side by side."""
    rewards = [name for name in names if name.startswith("reward/")]
    others = [name for name in names if not name.startswith("reward/")]
    pairs = zip_longest(rewards, others)
    return [name for pair in pairs for name in pair if name is not None]


def curve(runs: Sequence[RunRecord], name: str) -> dict[str, Any]:
    """Returns the figure of one metric of all runs over steps."""
    return figure(name, [line(run.series(name), run, number) for number, run in enumerate(runs)])


def accuracy(runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Returns the figure of accuracy: on training prompts as a thin line, on held-out ones as points with 95 %
    intervals; [] if there is none."""
    lines = []
    for number, run in enumerate(runs):
        if len(training := run.series("accuracy")):
            lines.append(line(training, run, number, label="training prompts", opacity=0.7, width=1))
        held_out, errors = run.series("evaluation/accuracy"), run.series("evaluation/standard_error")
        if len(held_out):
            by_step = dict(zip(errors.steps, errors.values, strict=True))
            spread = [finite_or_none(Z_95 * by_step.get(step, math.nan)) for step in held_out.steps]
            lines.append(line(held_out, run, number, label="held out", markers=True) | {"errors": spread})
    return [figure("accuracy (95 % intervals on held-out prompts)", lines, wide=True)] if lines else []


def phases(runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Returns a bar chart with the mean seconds of each phase of a step, one bar for each run."""
    seconds_by_run = [mean_seconds(run) for run in runs]
    if not any(any(parts.values()) for parts in seconds_by_run):
        return []
    parts = [
        {
            "name": name,
            "values": [seconds[name] for seconds in seconds_by_run],
            "color": COLORS[(number + 3) % len(COLORS)],
        }
        for number, name in enumerate(seconds_by_run[0])
    ]
    chart = figure("mean seconds of a step, by phase", [])
    return [chart | {"bars": {"rows": [run.name for run in runs], "parts": parts}}]


def mean_seconds(run: RunRecord) -> dict[str, float]:
    """Returns the mean seconds of a step by phase."""
    seconds = {name: mean_of(run.series(f"time/{name}")) for name in ("rollout", "update")}
    seconds["the rest"] = max(0.0, mean_of(run.series("time/step")) - sum(seconds.values()))
    return seconds


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
    """Returns the line of a series for a chart. Values that are not finite become gaps.

    number: the index of the run, which determines color and dashes. markers: whether to draw points.
    """
    indices = thinned_indices(len(series))
    return {
        "name": f"{run.name} {label}".strip(),
        "x": [series.steps[i] for i in indices],
        "y": [finite_or_none(series.values[i]) for i in indices],
        "markers": markers or len(series) <= 2,
        "opacity": opacity,
        "color": COLORS[number % len(COLORS)],
        "width": width,
        "dash": DASHES[number // len(COLORS) % len(DASHES)],
        "run": number,
        "metric": series.name,
    }


def figure(title: str, lines: Iterable[dict[str, Any]], *, wide: bool = False) -> dict[str, Any]:
    """Returns a figure of lines over steps. wide: as wide as the page."""
    height = 320 if wide else 230
    return {"title": title, "explanation": explanation(title), "lines": list(lines), "wide": wide, "height": height}


def thinned_indices(count: int, max_points: int = MAX_POINTS) -> list[int]:
    """Returns the indices of `count` points to draw: all, or evenly spaced ones and the last."""
    if count <= max_points:
        return list(range(count))
    stride = math.ceil(count / max_points)
    return sorted({*range(0, count, stride), count - 1})


def finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def mean_of(series: Series) -> float:
    return sum(series.finite) / len(series.finite) if series.finite else 0.0

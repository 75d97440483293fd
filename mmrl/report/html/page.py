"""Writes the report: one HTML file that needs no network."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from mmrl.report.health import BAD, MIN_PROMPTS, WARNING, HealthFinding, evaluated_prompts, examine, standard_error
from mmrl.report.html.cards import Card, cards
from mmrl.report.html.figures import COLORS, FigureGroup, axes, groups
from mmrl.report.html.galleries import BUDGET, Gallery, galleries
from mmrl.report.records import RunRecord, flatten
from mmrl.runtime.progress import duration_text


@dataclass(frozen=True)
class Chapter:
    """The part of the report about one run. color: that of its curves. paragraph: a summary in words."""

    run: RunRecord
    color: str
    cards: list[Card]
    paragraph: str
    findings: list[HealthFinding]
    galleries: list[Gallery]


def write_report(runs: Sequence[RunRecord], target: Path) -> Path:
    """Writes the report about `runs` to `target`, and returns `target`. Raises OSError if it cannot be written."""
    target.write_text(report_html(runs))
    return target


def report_html(runs: Sequence[RunRecord]) -> str:
    """Renders the report page of one or several runs, with everything embedded."""
    chapters = [
        chapter(run, COLORS[i % len(COLORS)], galleries(run, BUDGET // len(runs))) for i, run in enumerate(runs)
    ]
    curves = groups(runs)
    names = list(dict.fromkeys(run.name for run in runs))
    return (
        environment()
        .get_template("report.html.jinja")
        .render(
            title=", ".join(names),
            chapters=chapters,
            groups=curves,
            figures=figures_json(curves, runs),
            results=results(chapters),
            differences=differences([run.config for run in runs]),
            version_differences=differences([run.versions for run in runs]),
        )
    )


def chapter(run: RunRecord, color: str, run_galleries: list[Gallery]) -> Chapter:
    findings = examine(run)
    return Chapter(run, color, cards(run, findings), paragraph(run), findings, run_galleries)


def environment() -> Environment:
    """Returns the Jinja environment; values are escaped, and unknown names raise."""
    templates = Environment(
        loader=PackageLoader("mmrl.report.html"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters["number"] = number
    return templates


def figures_json(curves: Sequence[FigureGroup], runs: Sequence[RunRecord]) -> str:
    """Returns all figures and the runs' axes as JSON that is safe inside a script element."""
    figures = [figure for group in curves for figure in group.figures]
    return json.dumps({"figures": figures, "runs": axes(runs)}, allow_nan=False).replace("<", "\\u003c")


# --- text ---


def paragraph(run: RunRecord) -> str:
    """Returns a summary: what was trained on what, how the run ended, how long it took, and the held-out accuracy."""
    return " ".join(
        part
        for part in (training_sentence(run), run.ending.sentence, duration_sentence(run), accuracy_sentence(run))
        if part
    )


def training_sentence(run: RunRecord) -> str:
    """Returns the sentence on what a run trains: model, task, data, algorithm, step size."""
    if not run.config:
        return f"What {run.name} trained is unknown, since its configuration cannot be read."
    model, task = str(run.key("model.type", "model")).replace("_", "-"), str(run.key("task.type", "a task"))
    origin = run.key("model.path") or run.key("model.build")
    data = run.key("task.data.type") or run.key("task.simulator") or run.key("task.game.type")
    prompts, size = run.key("rollout.prompts"), run.key("rollout.group_size")
    per_step = f"{prompts} prompts" + (f" with {size} rollouts each" if size else "")
    text = f"{run.name} trains a {model} model" + (f" ({origin})" if origin else "")
    text += f" on {task.replace('_', ' ')}" + (f" ({data})" if data else "")
    text += f" with {run.key('algorithm.type')}: a step is {per_step}, the learning rate {run.key('optim.lr')}"
    return f"{text}, the seed {run.key('seed')}, and {run.steps} steps are planned."


def duration_sentence(run: RunRecord) -> str:
    """Returns the sentence on the time of the run and of a step; "" if they are unknown."""
    times = [row["time"] for row in [*run.rows, *run.evaluations] if "time" in row]
    steps = run.series("time/step").finite
    if not times or not steps:
        return ""
    per_step = f"a step took {sum(steps) / len(steps):.3g} s"
    return f"From its first line to its last it took {duration_text(max(times) - min(times))}; {per_step} on average."


def accuracy_sentence(run: RunRecord) -> str:
    """Returns the sentence on held-out accuracy, first and last, with standard errors."""
    accuracy, errors = run.series("evaluation/accuracy"), run.series("evaluation/standard_error")
    if not len(accuracy):
        return "Nothing was evaluated."
    points = [
        f"{value:.4f}{f' ± {errors.values[i]:.4f}' if i < len(errors) else ''} at step {step}"
        for i, (step, value) in enumerate(zip(accuracy.steps, accuracy.values, strict=True))
    ]
    if len(points) == 1:
        return f"Held-out accuracy was {points[0]}."
    change, error, prompts = accuracy.values[-1] - accuracy.values[0], standard_error(run), evaluated_prompts(run)
    times = f", {abs(change) / error:.1f} standard errors" if error > 0 and prompts >= MIN_PROMPTS else ""
    times += f", on {prompts} prompts: too few to tell it from chance" if prompts < MIN_PROMPTS else ""
    return f"Held-out accuracy went from {points[0]} to {points[-1]}: {change:+.4f}{times}."


# --- tables ---


# By column of the table of results: the metric below throughput/. All but the first are for one rank. Columns without
# any number are left out.
RATES = {
    "rollouts a second": "rollouts_per_second",
    "tokens a second and rank": "tokens_per_second",
    "images a second and rank": "images_per_second",
    "videos a second and rank": "videos_per_second",
    "policy steps a second and rank": "policy_steps_per_second",
    "episodes a second and rank": "episodes_per_second",
    "TFLOP a second and rank": "tflops_per_second",
    "MFU": "mfu",
}


def results(chapters: Sequence[Chapter]) -> dict[str, list[Any]]:
    """Returns columns by name with a value for each run. Numbers stay numbers, so that the table can be sorted."""
    columns: dict[str, list[Any]] = {name: [] for name in ("ended", "steps", "problems")}
    runs = [chapter.run for chapter in chapters]
    for chapter in chapters:
        columns["ended"].append(chapter.run.ending.state)
        columns["steps"].append(chapter.run.step)
        columns["problems"].append(sum(f.verdict in (BAD, WARNING) for f in chapter.findings))
    rewards = list(dict.fromkeys(name for run in runs for name in run.names if name.startswith(("reward/", "guard/"))))
    for name in ("evaluation/accuracy", *rewards):
        if any(len(run.series(name)) for run in runs):
            columns[f"{name}, first"] = [end(run, name, 0) for run in runs]
            columns[f"{name}, last"] = [end(run, name, -1) for run in runs]
    columns["standard error"] = [end(run, "evaluation/standard_error", -1) for run in runs]
    columns["best held-out"] = [max(run.series("evaluation/accuracy").finite, default=None) for run in runs]
    columns["seconds a step"] = [average(run, "time/step") for run in runs]
    for label, name in RATES.items():
        columns[label] = [average(run, f"throughput/{name}") for run in runs]
    return {name: column for name, column in columns.items() if any(value is not None for value in column)}


def end(run: RunRecord, name: str, position: int) -> float | None:
    """Returns the value of a metric at `position`: 0 is the first, -1 the last; None if it has none."""
    values = run.series(name).values
    return values[position] if values else None


def average(run: RunRecord, name: str) -> float | None:
    values = run.series(name).finite
    return sum(values) / len(values) if values else None


def differences(trees: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Returns the dotted keys whose values differ between the trees, with the value in each tree; a dash if it has no
    such key."""
    flat = [flatten(tree) for tree in trees]
    keys = dict.fromkeys(key for leaves in flat for key in leaves)
    by_key = {key: [str(leaves.get(key, "–")) for leaves in flat] for key in keys}
    return {key: values for key, values in by_key.items() if len(set(values)) > 1}


def number(value: object) -> str:
    """Returns a value as text for a table: floats with four digits, None as a dash."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return "–" if value is None else str(value)

"""The headline numbers of a run, as the cards at the top of its report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mmrl.report.health import BAD, GOOD, MIN_PROMPTS, WARNING, HealthFinding, evaluated_prompts, standard_error
from mmrl.report.records import RunRecord
from mmrl.runtime.progress import duration_text

MARKS = {"finished": GOOD, "failed": BAD, "killed": WARNING, "stopped": WARNING}


@dataclass(frozen=True)
class Card:
    """A number with its label and a note. mark: the class of its color: "good", "warning", "bad" or "". command:
    whether the value is a command, which is written as code."""

    label: str
    value: str
    note: str = ""
    mark: str = ""
    command: bool = False


def cards(run: RunRecord, findings: Sequence[HealthFinding]) -> list[Card]:
    """Returns the cards of a run, without those for which it has no numbers."""
    candidates = (accuracy(run), best(run), progress(run), duration(run), health(findings), next_command(run))
    return [card for card in candidates if card is not None]


def accuracy(run: RunRecord) -> Card | None:
    """Returns held-out accuracy before and after training; good or bad if the change exceeds its 95 % interval."""
    values = run.series("evaluation/accuracy").finite
    if not values:
        return None
    if len(values) == 1:
        return Card("held-out accuracy", f"{values[0]:.3f}")
    change, prompts = values[-1] - values[0], evaluated_prompts(run)
    if prompts < MIN_PROMPTS:
        return Card(
            "held-out accuracy", f"{values[0]:.3f} → {values[-1]:.3f}", f"on {prompts} prompts: too few", WARNING
        )
    interval = 1.96 * standard_error(run)
    mark = GOOD if change > interval else BAD if change < -interval else WARNING
    return Card(
        "held-out accuracy", f"{values[0]:.3f} → {values[-1]:.3f}", f"{change:+.3f} ± {interval:.3f} (95 %)", mark
    )


def best(run: RunRecord) -> Card | None:
    """Returns the best held-out accuracy and its step; None if there are fewer than three evaluations."""
    series = run.series("evaluation/accuracy")
    if len(series.finite) < 3:
        return None
    # NaN counts as the lowest accuracy
    value, step = max(zip(series.values, series.steps, strict=True), key=lambda pair: (pair[0] == pair[0], pair[0]))
    return Card("best held out", f"{value:.3f}", f"step {step}")


def progress(run: RunRecord) -> Card:
    of = f" of {run.steps}" if run.steps else ""
    return Card("steps", f"{run.step}{of}", run.ending.state, MARKS.get(run.ending.state, ""))


def duration(run: RunRecord) -> Card | None:
    """Returns the time from the first to the last logged line, and the mean seconds of a step; None if unknown."""
    times = [row["time"] for row in [*run.rows, *run.evaluations] if "time" in row]
    steps = run.series("time/step").finite
    if not times or not steps:
        return None
    return Card("time", duration_text(max(times) - min(times)), f"{sum(steps) / len(steps):.3g} s a step")


def health(findings: Sequence[HealthFinding]) -> Card | None:
    """Returns the number of problems and the names of the first two; None if nothing was checked."""
    if not findings:
        return None
    problems = [finding for finding in findings if finding.verdict != GOOD]
    if not problems:
        return Card("health", "good", f"{len(findings)} checks", GOOD)
    mark = BAD if any(finding.verdict == BAD for finding in problems) else WARNING
    return Card("health", f"{len(problems)} to look at", ", ".join(finding.name for finding in problems[:2]), mark)


def next_command(run: RunRecord) -> Card | None:
    """Returns the command to run next: evaluate a finished run, continue an interrupted one."""
    if run.ending.state == "finished":
        return Card("next", f"mmrl eval {run.folder}", command=True)
    if run.ending.state in ("stopped", "killed", "failed"):
        return Card("next", "the same command", "continues from the last checkpoint")
    return None

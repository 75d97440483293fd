"""`mmrl watch`: shows a run's metrics live in the terminal."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress import ProgressBar
from rich.table import Table
from rich.text import Text

from mmrl.errors import printable
from mmrl.report.health import BAD, GOOD, examine
from mmrl.report.records import RunRecord, Series, read_run
from mmrl.runtime.progress import duration_text

BLOCKS = "▁▂▃▄▅▆▇█"
METRIC_PREFIXES = (
    "accuracy",
    "reward/",
    "guard/",
    "entropy",
    "loss",
    "grad_norm",
    "advantages/zero_variance_groups",
    "unscored",
)
TIMES = ("time/step", "time/rollout", "time/update", "throughput/rollouts_per_second")
RECENT = 20  # steps for the means and for the estimate of the time left


def watch(folder: Path, *, every: float = 2.0, once: bool = False) -> None:
    """Shows the run in `folder` until it has ended; only once if `once`, or if the output is not a terminal.

    every: seconds between two updates. Raises UserError if there is no such folder.
    """
    console = Console(highlight=False)
    run = read_run(folder)
    if once or not sys.stdout.isatty():
        console.print(screen(run))
        return
    with Live(screen(run), console=console, auto_refresh=False) as live:
        while run.ending.state in ("running", "empty") or may_run_elsewhere(run):
            time.sleep(every)
            run = read_run(folder)
            live.update(screen(run), refresh=True)


def may_run_elsewhere(run: RunRecord) -> bool:
    """Returns whether the run may still be running on another host."""
    return run.ending.state == "unknown" and "may be running" in run.ending.sentence


def screen(run: RunRecord) -> RenderableType:
    """Returns the panel of a run: its state, progress, metrics, and problems with advice."""
    parts: list[RenderableType] = [Text(printable(run.ending.sentence)), *progress(run)]
    parts += [table(run, metrics_of(run))] if run.names else []
    parts += [Text(printable(f"- {problem}"), style="yellow") for problem in run.problems]
    for finding in examine(run):
        if finding.verdict != GOOD:
            style = "red" if finding.verdict == BAD else "yellow"
            parts.append(Text.assemble((finding.name, f"bold {style}"), f" {finding.sentence} Try: {finding.advice}"))
    return Panel(Group(*parts), title=run.name, title_align="left")


def progress(run: RunRecord) -> list[RenderableType]:
    """Returns a progress bar over the steps, and a line with the time left; [] before the first step."""
    if run.steps is None or not run.step:
        return []
    left = time_left(run)
    text = f"step {run.step} of {run.steps}" + (f", {duration_text(left)} left" if left else "")
    return [ProgressBar(total=run.steps, completed=run.step, width=60), Text(text)]


def time_left(run: RunRecord) -> float | None:
    """Returns the seconds left at the speed of the last RECENT steps, with evaluations and checkpoints; None if it is
    unknown."""
    last = [row["time"] for row in run.rows if "time" in row][-RECENT:]
    if run.steps is None or len(last) < 2:
        return None
    return (run.steps - run.step) * (last[-1] - last[0]) / (len(last) - 1)


def metrics_of(run: RunRecord) -> list[str]:
    """Returns the names of the metrics to show, held-out accuracy first."""
    held_out = [name for name in run.names if name.startswith("evaluation/accuracy")]
    return [
        *held_out,
        *(name for name in run.names if name.startswith(METRIC_PREFIXES)),
        *(n for n in TIMES if n in run.names),
    ]


def table(run: RunRecord, names: list[str]) -> Table:
    """Returns the terminal table of metrics: last value, mean of recent steps and a sparkline."""
    grid = Table(box=None, pad_edge=False)
    for head in ("metric", "last", f"mean of {RECENT}", "course"):
        grid.add_column(head, justify="left" if head in ("metric", "course") else "right", no_wrap=True)
    for name in names:
        series = run.series(name)
        if series.values:
            recent = series.finite[-RECENT:]
            mean = f"{sum(recent) / len(recent):.4g}" if recent else ""
            grid.add_row(name, f"{series.values[-1]:.4g}", mean, sparkline(series))
    return grid


def sparkline(series: Series, width: int = 32) -> str:
    """Returns a line of up to `width` block characters. Each shows the mean of an equal share of the values, scaled to
    the range of all means."""
    values = series.finite
    count = min(width, len(values))
    shares = [values[i * len(values) // count : (i + 1) * len(values) // count] for i in range(count)]
    means = [sum(share) / len(share) for share in shares]
    low, high = min(means, default=0.0), max(means, default=0.0)
    if high == low:
        return BLOCKS[3] * count  # all equal: a line at half height
    return "".join(BLOCKS[min(7, int(8 * (mean - low) / (high - low)))] for mean in means)

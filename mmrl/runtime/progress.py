"""Shows progress and time left: as bars on a terminal, and in a log as a line every LINES_EVERY seconds."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TextColumn, TimeElapsedColumn

from mmrl.errors import printable

LINES_EVERY = 10.0  # seconds between two lines of a piece of work in a log
DRAWN_EVERY = 0.1  # seconds between two drawings of a bar
DAY = 86400.0


class Interval:
    """A timer that is due every `seconds`. now: a clock, in seconds."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic, *, at_once: bool = False) -> None:
        """at_once: the first call of `due` is true; otherwise not before `seconds` have passed."""
        self._seconds, self._now = seconds, now
        self._last = -math.inf if at_once else now()

    def due(self) -> bool:
        """Returns whether `seconds` have passed since the last call that returned True."""
        moment = self._now()
        if moment - self._last < self._seconds:
            return False
        self._last = moment
        return True


class Work:
    """A progress bar of `total` equal parts. what: its label. lines: whether a log gets lines in place of the bar."""

    def __init__(self, display: Display, what: str, total: int, done: int, *, lines: bool) -> None:
        self._display, self._what, self._total = display, what, total
        self._task = display.bars.add_task(what, total=total, completed=done, left="")
        self._drawn, self._line_interval = Interval(DRAWN_EVERY, display.now), Interval(LINES_EVERY, display.now)
        self._lines = lines

    def advance(self, parts: int = 1) -> None:
        """Counts finished parts, and draws the bar or prints a line if one is due."""
        self._display.bars.update(self._task, advance=parts)
        self._display.bars.update(self._task, left=time_left_text(self.left))
        if self._display.draws:
            if self._drawn.due() or self.done == self._total:
                self._display.bars.refresh()
        elif self._lines and self.done < self._total and self._line_interval.due():
            left = time_left_text(self.left)
            self._display.line(f"{self._what}: {self.done} of {self._total}" + (f", {left}" if left else ""))

    @property
    def done(self) -> int:
        return round(self._bar.completed)

    @property
    def left(self) -> float | None:
        """Seconds left at the pace so far; None: not known yet."""
        return self._bar.time_remaining

    @property
    def _bar(self) -> Task:
        return next(bar for bar in self._display.bars.tasks if bar.id == self._task)

    def close(self) -> None:
        self._display.bars.remove_task(self._task)
        self._display.bars.refresh()


class Display:
    """Prints lines and progress bars of this process. Lines appear above bars; only rank 0 shows bars."""

    def __init__(self, console: Console | None = None, now: Callable[[], float] = time.monotonic) -> None:
        # Lines may hold square brackets and colons, which rich would read as markup.
        self.console = console or Console(highlight=False, markup=False, emoji=False)
        self.now = now
        # No thread draws: a process that is forked while it holds a lock would wait for it for ever.
        self.bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=self.console,
            auto_refresh=False,
            transient=True,
            get_time=now,
            speed_estimate_period=DAY,
        )

    @property
    def draws(self) -> bool:
        """True while bars are on the screen."""
        return self.bars.live.is_started

    def line(self, text: str) -> None:
        """Prints a line above the bars."""
        self.console.print(printable(text), soft_wrap=True)

    @contextmanager
    def work(self, what: str, total: int, done: int = 0, *, lines: bool = True) -> Iterator[Work]:
        """Shows a bar with the time left while the block runs, which calls `advance`. A log gets a line every
        LINES_EVERY seconds instead, or none where `lines` is False."""
        first = os.environ.get("RANK", "0") == "0"
        work = Work(self, what, total, done, lines=lines and first)
        if first and self.console.is_terminal and not self.console.is_dumb_terminal and not self.draws:
            self.bars.start()
        try:
            yield work
        finally:
            work.close()
            if self.draws and not self.bars.tasks:
                self.bars.stop()


display = Display()  # of this process, which has one terminal


class Items(Sized, Iterable[Any], Protocol):
    """A sized iterable."""


def weights_read(factory: Callable[..., Any], items: tuple[Items, ...], options: dict[str, Any]) -> Any:
    """Replaces transformers' progress bars (see its `set_tqdm_hook`): loading weights gets one of mmrl's, anything else
    none."""
    what = str(options.get("desc"))
    if not items or not what.startswith("Loading"):
        return factory(*items, **{**options, "disable": True})
    return with_progress(items[0], what.lower())


def with_progress(items: Items, what: str) -> Iterator[Any]:
    """Yields the items and shows their progress."""
    with display.work(what, len(items)) as work:
        for item in items:
            yield item
            work.advance()


def time_left_text(seconds: float | None) -> str:
    """Returns the time left as in "3 min 20 s left"; "" where it is unknown."""
    return "" if seconds is None else f"{duration_text(seconds)} left"


def duration_text(seconds: float) -> str:
    """Returns a duration in its two largest units: 45 s, 3 min 20 s, 2 h 5 min, 3 d 4 h."""
    seconds = max(0, round(seconds))
    units = [("d", 86400), ("h", 3600), ("min", 60), ("s", 1)]
    parts = []
    for name, size in units:
        count, seconds = divmod(seconds, size)
        parts.append((count, name))
    first = next((i for i, (count, _) in enumerate(parts) if count), len(parts) - 1)
    return " ".join(f"{count} {name}" for count, name in parts[first : first + 2] if count) or "0 s"

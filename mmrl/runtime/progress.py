"""How far long work is, and how long it will take: bars on a terminal; in a log, a line every so often."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TextColumn, TimeElapsedColumn

LINES_EVERY = 10.0  # seconds between two lines of a piece of work in a log
DRAWN_EVERY = 0.1  # seconds between two drawings of a bar
DAY = 86400.0


class Interval:
    """Whether it is time again: when `seconds` have passed since the last time. now: a clock, in seconds."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic, *, at_once: bool = False) -> None:
        """at_once: it is time when it is first asked; otherwise `seconds` after it was made."""
        self._seconds, self._now = seconds, now
        self._last = -math.inf if at_once else now()

    def due(self) -> bool:
        moment = self._now()
        if moment - self._last < self._seconds:
            return False
        self._last = moment
        return True


class Work:
    """A piece of work that consists of `total` equal parts."""

    def __init__(self, display: Display, what: str, total: int, done: int, *, lines: bool) -> None:
        self._display, self._what, self._total = display, what, total
        self._task = display.bars.add_task(what, total=total, completed=done, left="")
        self._drawn, self._told = Interval(DRAWN_EVERY, display.now), Interval(LINES_EVERY, display.now)
        self._lines = lines

    def advance(self, parts: int = 1) -> None:
        self._display.bars.update(self._task, advance=parts)
        self._display.bars.update(self._task, left=told_left(self.left))
        if self._display.draws:
            if self._drawn.due() or self.done == self._total:
                self._display.bars.refresh()
        elif self._lines and self.done < self._total and self._told.due():
            left = told_left(self.left)
            self._display.line(f"{self._what}: {self.done} of {self._total}" + (f", {left}" if left else ""))

    @property
    def done(self) -> int:
        return round(self._bar.completed)

    @property
    def left(self) -> float | None:
        """Seconds that the parts that are left will take at the pace of those that were done; None: not known yet."""
        return self._bar.time_remaining

    @property
    def _bar(self) -> Task:
        return next(bar for bar in self._display.bars.tasks if bar.id == self._task)

    def close(self) -> None:
        self._display.bars.remove_task(self._task)
        self._display.bars.refresh()


class Display:
    """What this process prints while it works. Lines come above the bars of what is going on; ranks other than the
    first show no bars."""

    def __init__(self, console: Console | None = None, now: Callable[[], float] = time.monotonic) -> None:
        # What is printed may hold square brackets and colons, which rich would read as its own marks.
        self.console = console or Console(highlight=False, markup=False, emoji=False)
        self.now = now
        # No thread draws: processes that are forked while it holds a lock would never get it.
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
        """Whether bars are on the screen."""
        return self.bars.live.is_started

    def line(self, text: str) -> None:
        self.console.print(text, soft_wrap=True)

    @contextmanager
    def work(self, what: str, total: int, done: int = 0, *, lines: bool = True) -> Iterator[Work]:
        """A bar with the time left while the block runs, which says what is done with `advance`. In a log a line every
        LINES_EVERY seconds instead, or nothing where `lines` is False or the block does not take as long."""
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
    """What can be counted and gone through."""


def weights_read(factory: Callable[..., Any], items: tuple[Items, ...], options: dict[str, Any]) -> Any:
    """What transformers goes through in place of a bar of its own (its `set_tqdm_hook`): the weights that it reads have
    one of ours, anything else has none."""
    what = str(options.get("desc"))
    if not items or not what.startswith("Loading"):
        return factory(*items, **{**options, "disable": True})
    return told_items(items[0], what.lower())


def told_items(items: Items, what: str) -> Iterator[Any]:
    """The items, one by one, with a bar or lines that say how many are done."""
    with display.work(what, len(items)) as work:
        for item in items:
            yield item
            work.advance()


def told_left(seconds: float | None) -> str:
    """As in "3 min 20 s left"; nothing where it is not known."""
    return "" if seconds is None else f"{told_time(seconds)} left"


def told_time(seconds: float) -> str:
    """A duration in the two largest units that matter: 45 s, 3 min 20 s, 2 h 5 min, 3 d 4 h."""
    seconds = max(0, round(seconds))
    units = [("d", 86400), ("h", 3600), ("min", 60), ("s", 1)]
    parts = []
    for name, size in units:
        count, seconds = divmod(seconds, size)
        parts.append((count, name))
    first = next((i for i, (count, _) in enumerate(parts) if count), len(parts) - 1)
    return " ".join(f"{count} {name}" for count, name in parts[first : first + 2] if count) or "0 s"

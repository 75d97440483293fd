"""The table that an attack prints: what was tried, how often, and with which results."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable


class Table:
    """Counts by row. A case that raises is not as wanted."""

    def __init__(self, title: str) -> None:
        self.title, self.began = title, time.monotonic()
        self.tried: dict[str, int] = defaultdict(int)
        self.outcomes: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        self.surprises: list[str] = []

    def case(self, row: str, name: str, attempt: Callable[[], str], *wanted: str) -> None:
        """attempt gives the outcome in a word; wanted: those that are right."""
        try:
            outcome = attempt()
        except Exception as error:
            outcome = f"{type(error).__name__}: {str(error)[:120]}"
        self.tried[row] += 1
        self.outcomes[row][outcome] += 1
        if outcome not in wanted:
            self.surprises.append(f"{row}, {name}: {outcome}")

    def finish(self) -> int:
        """Prints the table; the exit code is 1 where an outcome was not wanted."""
        print(f"{self.title}: {sum(self.tried.values())} tries in {time.monotonic() - self.began:.0f} s\n")
        print("| tried | times | outcome |\n| --- | --- | --- |")
        for row, times in self.tried.items():
            told = ", ".join(f"{count} {outcome}" for outcome, count in self.outcomes[row].items())
            print(f"| {row} | {times} | {told} |")
        print(f"\nnot as wanted: {len(self.surprises)}")
        for surprise in self.surprises:
            print(f"  {surprise}")
        sys.stdout.flush()
        return 1 if self.surprises else 0

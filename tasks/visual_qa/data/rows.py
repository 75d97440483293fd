"""Rows of the user's data, as dictionaries, to prompts: one mapping and one check for files and for Hugging Face."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Protocol

from mmrl.errors import UserError
from mmrl.protocols.parts import PromptCheck
from mmrl.rollouts import Prompt
from mmrl.runtime.jsonl import RowError
from mmrl.runtime.progress import display
from mmrl.tasks.visual_qa import verdicts

SHOWN = 5  # bad rows in an error
CHECKED_AT_ONCE = 256  # rows, by one thread
SHAPE_ROWS = 64  # rows, to know their shape
THREADS = 8  # that wait for disks
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be used: its number, as `Rows.number` counts, and one line naming file, row and field."""

    line: int
    reason: str


class Rows(Protocol):
    """Rows by index, read on access, by several threads at once; `unit` is what `number` counts, for messages:
    'line 7', 'row 7'. `columns` are those that are known without reading a row.
    `stamp` changes when the rows do; None where that cannot be known."""

    unit: str

    def __len__(self) -> int: ...
    def __getitem__(self, row: int, /) -> object: ...
    def number(self, row: int) -> int: ...
    def columns(self) -> Sequence[str]: ...
    def stamp(self) -> list[Any] | None: ...


def first_rows(rows: Rows, count: int = SHAPE_ROWS) -> Iterator[object]:
    """Yields those of the first rows that can be read."""
    for row in range(min(count, len(rows))):
        try:
            yield rows[row]
        except RowError:  # which the check of all rows names
            continue


class Mapped(Protocol):
    """A mapping of rows to prompts: a dataclass whose fields key the verdict on rows. Both methods raise RowError."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def prompt(self, row: Any, prompt_id: str) -> Prompt: ...
    def check(self, row: object) -> None: ...


class RowSource:
    """Prompts from rows: a pass that checks every row and keeps none in memory, then lazy access to the good ones.

    The pass reads the rows and the headers of their images; its verdict is cached for the next start with the same
    file (see `verdicts`). Bad rows are left out, counted and listed in `bad`. Images are decoded when they are
    used: a row that turns out bad then, or was never checked (`validate=False`), is left out from there on, and the
    next good row takes its place.

    Raises ValueError where the share of bad rows exceeds `max_bad_share` and where no row is left; UserError for the
    first when a prompt is accessed.
    """

    def __init__(self, rows: Rows, fields: Mapped, *, name: str, prefix: str, max_bad_share: float, validate: bool):
        if not 0 <= max_bad_share <= 1:
            raise ValueError(f"max_bad_share must lie in 0 .. 1, not {max_bad_share}")
        self.name, self.max_bad_share = name, max_bad_share
        self._rows, self._fields, self._prefix = rows, fields, prefix
        self.change: Callable[[Prompt], Prompt] | None = None  # of prompts, before they are tried and returned
        self._prompt_problem: PromptCheck | None = None
        self._fitting: set[int] = set()  # rows that were tried
        self._reasons = self._verdict() if validate else {}
        if problem := self._too_many():
            raise ValueError(problem)
        self._warn()
        self._good: Sequence[int] = range(len(rows))
        if self._reasons:
            self._good = [row for row in range(len(rows)) if row not in self._reasons]
        if not self._good:
            raise ValueError(f"{name}: no question in it")

    def __len__(self) -> int:
        return len(self._good)

    @property
    def bad(self) -> list[BadRow]:
        """The rows that are known to be bad."""
        return [BadRow(self._rows.number(row), self._line(row)) for row in sorted(self._reasons)]

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < len(self):
            raise IndexError(f"item {index} of {len(self)}")
        for position in chain(range(index, len(self)), range(index)):
            row = self._good[position]
            if row in self._reasons:
                continue
            try:
                return self._prompt(row)
            except RowError as error:
                self._lose(row, str(error))
        raise UserError(f"{self.name}: no row of it can be used; the first: {self._line(min(self._reasons))}")

    def read(self, index: int) -> Prompt:
        """Returns the prompt of exactly this row, not of the next one if it cannot be used. Raises RowError."""
        return self._prompt(self._good[index])

    def fit(self, prompt_problem: PromptCheck) -> None:
        """Leaves out rows whose prompts do not fit, from here on, when they are first used."""
        self._prompt_problem, self._fitting = prompt_problem, set()

    def fits(self, index: int) -> bool:
        """Returns whether this row can be used; if not, it is named and left out. Raises UserError as `self[index]`."""
        row = self._good[index]
        if row not in self._reasons and row not in self._fitting:
            try:
                self._prompt(row)
            except RowError as error:
                self._lose(row, str(error))
        return row not in self._reasons

    def _prompt(self, row: int) -> Prompt:
        prompt = self._fields.prompt(self._rows[row], f"{self._prefix}:{self._rows.number(row)}")
        if self.change is not None:
            prompt = self.change(prompt)
        if self._prompt_problem is not None and row not in self._fitting:
            if (reason := self._prompt_problem(prompt)) is not None:
                raise RowError(reason)
            self._fitting.add(row)
        return prompt

    def _lose(self, row: int, reason: str) -> None:
        """Leaves a bad row out and logs why. Raises UserError beyond max_bad_share."""
        self._reasons[row] = reason
        log.warning("left out, the next row takes its place: %s", self._line(row))
        if problem := self._too_many():
            raise UserError(problem)

    def _verdict(self) -> dict[int, str]:
        """Returns the bad rows by index, with the reason."""
        facts = self._rows.stamp()
        key = None if facts is None else [self.name, *facts, type(self._fields).__name__, asdict(self._fields)]
        cached = None if key is None else verdicts.recall(key, len(self._rows))
        if cached is not None:
            return cached
        starts = range(0, len(self._rows), CHECKED_AT_ONCE)
        with ThreadPoolExecutor(THREADS, "rows") as pool:
            bad = self._gathered(pool.map(self._checked, starts))
        if key is not None:
            verdicts.remember(key, len(self._rows), bad)
        return bad

    def _gathered(self, parts: Iterable[dict[int, str]]) -> dict[int, str]:
        """Returns the bad rows of all parts, which are CHECKED_AT_ONCE rows each but for the last."""
        bad: dict[int, str] = {}
        with display.work(f"checking {Path(self.name).name}", len(self._rows)) as work:
            for part in parts:
                bad |= part
                work.advance(min(CHECKED_AT_ONCE, len(self._rows) - work.done))
        return bad

    def _checked(self, start: int) -> dict[int, str]:
        bad = {}
        for row in range(start, min(start + CHECKED_AT_ONCE, len(self._rows))):
            try:
                self._fields.check(self._rows[row])
            except RowError as error:
                bad[row] = str(error)
        return bad

    def _line(self, row: int) -> str:
        return f"{self.name}, {self._rows.unit} {self._rows.number(row)}: {self._reasons[row]}"

    def _too_many(self) -> str | None:
        """Returns the message for more bad rows than max_bad_share allows, which names the first of each kind; else
        None."""
        total, bad = len(self._rows), sorted(self._reasons)
        if len(bad) <= self.max_bad_share * total:
            return None
        alike: dict[str, list[int]] = {}
        for row in bad:
            alike.setdefault(self._reasons[row], []).append(row)
        first = [rows[0] for rows in alike.values()][:SHOWN]
        more = {row: len(alike[self._reasons[row]]) - 1 for row in first}
        listed = "; ".join(self._line(row) + (f" (and {more[row]} alike)" if more[row] else "") for row in first)
        listed += "; ..." if len(alike) > SHOWN else ""
        return (
            f"{self.name}: {len(bad)} of {total} rows cannot be used, more than max_bad_share={self.max_bad_share:g} "
            f"allows; mend or remove them, or raise max_bad_share: {listed}"
        )

    def _warn(self) -> None:
        if self._reasons:
            log.warning(
                "%s: %d of %d rows cannot be used and are left out:", self.name, len(self._reasons), len(self._rows)
            )
        for row in self._reasons:
            log.warning("  %s", self._line(row))

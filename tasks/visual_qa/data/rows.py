"""Prompts from rows of the user's data: rows are checked and mapped alike for files and for Hugging Face datasets."""

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

MAX_LISTED = 5  # bad rows that an error lists
CHECK_BATCH = 256  # rows that a thread checks at once
FORMAT_ROWS = 64  # first rows from which the format is detected
THREADS = 8  # threads that check rows; more than cores, since they wait for disks
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be used: its number (see `Rows.number`), and a line that names the file, the row and why."""

    line: int
    reason: str


class Rows(Protocol):
    """Rows by index, read on access, by several threads at once."""

    unit: str  # what `number` counts, for messages: "line" or "row"

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> object: ...

    def number(self, row: int) -> int:
        """Returns the number of a row in the user's file or dataset, for messages."""

    def columns(self) -> Sequence[str]:
        """Returns the columns that are known without reading a row."""

    def stamp(self) -> list[Any] | None:
        """Returns a JSON value that changes when the rows do; None if that cannot be known."""


def first_rows(rows: Rows, num_rows: int = FORMAT_ROWS) -> Iterator[object]:
    """Yields the first rows; unreadable ones are skipped, since the check of all rows reports them."""
    for row in range(min(num_rows, len(rows))):
        try:
            yield rows[row]
        except RowError:
            continue


class RowMapping(Protocol):
    """A mapping of rows to prompts. It is a dataclass: cached checks of rows are valid for equal fields only. Both
    methods raise RowError."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def prompt(self, row: Any, prompt_id: str) -> Prompt: ...
    def check(self, row: object) -> None: ...


class RowSource:
    """Prompts from rows: construction checks all rows, access reads one row.

    The check reads the rows and the headers of their images, keeps none in memory, and is cached for the next start
    with the same file (see `verdicts`). Bad rows are left out and listed in `bad`. Images are decoded on access. A row
    that turns out to be bad only then is left out from then on, and the next good row is returned in its place. If
    `validate` is False, rows are not checked at construction, and all bad rows are found in this way.

    name: the file or dataset, for messages; prefix: the start of prompt ids. Raises ValueError if the share of bad rows
    exceeds `max_bad_share`, or if no row is left. Access raises UserError if the share then exceeds it.
    """

    def __init__(self, rows: Rows, fields: RowMapping, *, name: str, prefix: str, max_bad_share: float, validate: bool):
        """Checks all rows if `validate`, and leaves bad ones out. name: for messages. prefix: the beginning of prompt
        ids. Raises ValueError if the share of bad rows exceeds `max_bad_share`, or no row is left."""
        if not 0 <= max_bad_share <= 1:
            raise ValueError(f"max_bad_share must be from 0 to 1, not {max_bad_share}")
        self.name, self.max_bad_share = name, max_bad_share
        self._rows, self._fields, self._prefix = rows, fields, prefix
        self.change: Callable[[Prompt], Prompt] | None = None  # applied to prompts before they are checked and returned
        self._prompt_problem: PromptCheck | None = None  # returns why a prompt does not fit the model, or None
        self._fitting: set[int] = set()  # rows that passed _prompt_problem
        self._reasons = self._check_all() if validate else {}  # bad rows, and why they are bad
        if problem := self._too_many():
            raise ValueError(problem)
        self._warn()
        self._good: Sequence[int] = range(len(rows))
        if self._reasons:
            self._good = [row for row in range(len(rows)) if row not in self._reasons]
        if not self._good:
            why = "the warnings above say why" if self._reasons else "it is empty"
            raise ValueError(f"{name}: no row of it can be used; {why}")

    def __len__(self) -> int:
        return len(self._good)

    @property
    def bad(self) -> list[BadRow]:
        """The rows that are known to be bad."""
        return [BadRow(self._rows.number(row), self._message(row)) for row in sorted(self._reasons)]

    def __getitem__(self, index: int) -> Prompt:
        """Returns the prompt of row `index`, or of the next good row if it cannot be used. Raises UserError if none
        can, or too many are bad."""
        if not 0 <= index < len(self):
            raise IndexError(f"index {index} is out of range: there are {len(self)} prompts")
        # If the row turns out to be bad, the next good one is returned; after the last row the first one follows.
        for position in chain(range(index, len(self)), range(index)):
            row = self._good[position]
            if row in self._reasons:
                continue
            try:
                return self._prompt(row)
            except RowError as error:
                self._leave_out(row, str(error))
        raise UserError(f"{self.name}: no row of it can be used; the first error: {self._message(min(self._reasons))}")

    def read(self, index: int) -> Prompt:
        """Returns the prompt of exactly this row, not of the next one if it cannot be used. Raises RowError."""
        return self._prompt(self._good[index])

    def fit(self, prompt_problem: PromptCheck) -> None:
        """Sets the check of prompts against the model. A row whose prompt fails it is left out when it is first
        used."""
        self._prompt_problem, self._fitting = prompt_problem, set()

    def fits(self, index: int) -> bool:
        """Returns whether this row can be used; if not, it is logged and left out. Raises UserError if the share of bad
        rows then exceeds `max_bad_share`."""
        row = self._good[index]
        if row not in self._reasons and row not in self._fitting:
            try:
                self._prompt(row)
            except RowError as error:
                self._leave_out(row, str(error))
        return row not in self._reasons

    def _prompt(self, row: int) -> Prompt:
        """Returns the prompt of a row. Raises RowError if the row cannot be used, or does not fit the model."""
        prompt = self._fields.prompt(self._rows[row], f"{self._prefix}:{self._rows.number(row)}")
        if self.change is not None:
            prompt = self.change(prompt)
        if self._prompt_problem is not None and row not in self._fitting:
            if (reason := self._prompt_problem(prompt)) is not None:
                raise RowError(reason)
            self._fitting.add(row)
        return prompt

    def _leave_out(self, row: int, reason: str) -> None:
        """Leaves a bad row out and logs why. Raises UserError if the share of bad rows now exceeds max_bad_share."""
        self._reasons[row] = reason
        log.warning("left out, the next row takes its place: %s", self._message(row))
        if problem := self._too_many():
            raise UserError(problem)

    def _check_all(self) -> dict[int, str]:
        """Checks all rows, or reads the cached result. Returns the reason of each bad row, by index."""
        stamp = self._rows.stamp()
        key = None if stamp is None else [self.name, *stamp, type(self._fields).__name__, asdict(self._fields)]
        cached = None if key is None else verdicts.load(key, len(self._rows))
        if cached is not None:
            return cached
        starts = range(0, len(self._rows), CHECK_BATCH)
        with ThreadPoolExecutor(THREADS, "rows") as pool:
            bad = self._merge(pool.map(self._check_batch, starts))
        if key is not None:
            verdicts.save(key, len(self._rows), bad)
        return bad

    def _merge(self, batches: Iterable[dict[int, str]]) -> dict[int, str]:
        """Merges the bad rows of all batches of CHECK_BATCH rows, and displays the progress."""
        bad: dict[int, str] = {}
        with display.work(f"checking {Path(self.name).name}", len(self._rows)) as work:
            for batch in batches:
                bad |= batch
                work.advance(min(CHECK_BATCH, len(self._rows) - work.done))
        return bad

    def _check_batch(self, start: int) -> dict[int, str]:
        """Checks CHECK_BATCH rows from `start` on. Returns the reason of each bad row, by index."""
        bad = {}
        for row in range(start, min(start + CHECK_BATCH, len(self._rows))):
            try:
                self._fields.check(self._rows[row])
            except RowError as error:
                bad[row] = str(error)
        return bad

    def _message(self, row: int) -> str:
        return f"{self.name}, {self._rows.unit} {self._rows.number(row)}: {self._reasons[row]}"

    def _too_many(self) -> str | None:
        """Returns an error message if more rows are bad than max_bad_share allows, else None. It lists the first row of
        each reason."""
        num_rows, bad = len(self._rows), sorted(self._reasons)
        if len(bad) <= self.max_bad_share * num_rows:
            return None
        by_reason: dict[str, list[int]] = {}
        for row in bad:
            by_reason.setdefault(self._reasons[row], []).append(row)
        listed = []
        for rows in list(by_reason.values())[:MAX_LISTED]:
            more = f" (and {len(rows) - 1} more like it)" if len(rows) > 1 else ""
            listed.append(self._message(rows[0]) + more)
        if len(by_reason) > MAX_LISTED:
            listed.append("...")
        return (
            f"{self.name}: {len(bad)} of {num_rows} rows cannot be used, more than "
            f"max_bad_share={self.max_bad_share:g} allows; fix or remove them, or raise max_bad_share: "
            + "; ".join(listed)
        )

    def _warn(self) -> None:
        """Logs the rows that are left out, each with the reason."""
        if self._reasons:
            log.warning(
                "%s: %d of %d rows cannot be used and are left out:", self.name, len(self._reasons), len(self._rows)
            )
        for row in self._reasons:
            log.warning("  %s", self._message(row))

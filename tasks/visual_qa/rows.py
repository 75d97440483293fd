"""Rows of the user's data, as dictionaries, to prompts: one mapping and one check for files and for Hugging Face."""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from PIL import Image

from mmrl.rollouts import Prompt

MARKER = "<image>"
log = logging.getLogger(__name__)


class RowError(ValueError):
    """A row cannot be used; the message is one line that names the field."""


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be used: its number, as `Rows.number` counts, and one line naming file, row and field."""

    line: int
    reason: str


@dataclass(frozen=True)
class Fields:
    """Which field of a row holds what, and the folder that relative paths of pictures start from.

    The picture field may be absent or empty (a question without pictures), one picture, or a list of them; a picture is
    a path, {"bytes": ..., "path": ...} with either filled, or a PIL image.
    """

    images: str = "images"
    problem: str = "problem"
    answer: str = "answer"
    image_root: Path | None = None

    def prompt(self, row: Any, prompt_id: str) -> Prompt:
        """The prompt of a row, its pictures decoded to RGB; what the row holds besides goes to metadata.

        Raises RowError for a row that is no object, a problem or an answer that is missing or empty, a picture that
        cannot be read, and markers that do not match the pictures.
        """
        text, answer = self.checked(row)
        images = tuple(self._open(picture, index) for index, picture in enumerate(self._pictures(row)))
        used = (self.images, self.problem, self.answer)
        rest = {key: value for key, value in row.items() if key not in used}
        return Prompt(id=prompt_id, text=text, images=images, answer=answer, metadata=rest)

    def checked(self, row: Any) -> tuple[str, Any]:
        """Problem and answer of a row, checked as in `prompt` but for the pictures themselves."""
        if not isinstance(row, Mapping):
            raise RowError(f"a row must be an object, not {type(row).__name__}")
        problem, answer = (self._filled(row, name) for name in (self.problem, self.answer))
        if not isinstance(problem, str):
            raise RowError(f"field {self.problem!r} must be text, not {type(problem).__name__}")
        markers, pictures = problem.count(MARKER), len(self._pictures(row))
        if markers not in (0, pictures):
            raise RowError(
                f"field {self.problem!r} has {markers} {MARKER} markers, field {self.images!r} has {pictures} pictures"
            )
        return problem, answer

    def _filled(self, row: Mapping[str, Any], name: str) -> Any:
        if name not in row:
            raise RowError(f"field {name!r} is missing (fields: {', '.join(map(str, row)) or 'none'})")
        value = row[name]
        if value is None or value == [] or (isinstance(value, str) and not value.strip()):
            raise RowError(f"field {name!r} is empty")
        return value

    def _pictures(self, row: Mapping[str, Any]) -> list[Any]:
        value = row.get(self.images)
        return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]

    def _open(self, picture: Any, index: int) -> Image.Image:
        if isinstance(picture, Image.Image):
            return picture.convert("RGB")
        data = picture.get("bytes") if isinstance(picture, Mapping) else None
        path = picture.get("path") if isinstance(picture, Mapping) else picture
        if not data and not (isinstance(path, str) and path):
            raise RowError(f"field {self.images!r}, picture {index}: neither a path nor bytes")
        source = io.BytesIO(data) if data else (self.image_root or Path()) / str(path)
        try:
            with Image.open(source) as opened:
                return opened.convert("RGB")  # decodes everything, so a torn file is found here
        except (OSError, Image.DecompressionBombError, SyntaxError, ValueError) as error:
            what = "bytes" if data else str(source)
            raise RowError(f"field {self.images!r}, picture {index}: cannot read {what}: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


class Rows(Protocol):
    """Rows by index, read when asked for; `unit` is what `number` counts, for messages: 'line 7', 'row 7'."""

    unit: str

    def __len__(self) -> int: ...
    def __getitem__(self, row: int, /) -> Any: ...
    def number(self, row: int) -> int: ...


class RowSource:
    """Prompts from rows: a pass that checks every row and holds none of them, then lazy access to the good ones.

    Bad rows are left out, counted and listed in `bad`. With `validate=False` nothing is checked at construction, and a
    bad row raises ValueError when it is read. Raises ValueError where the share of bad rows exceeds `max_bad_share` and
    where no row is left.
    """

    def __init__(self, rows: Rows, fields: Fields, *, name: str, prefix: str, max_bad_share: float, validate: bool):
        if not 0 <= max_bad_share <= 1:
            raise ValueError(f"max_bad_share must lie in 0 .. 1, not {max_bad_share}")
        self.name, self.bad = name, list[BadRow]()
        self._rows, self._fields, self._prefix = rows, fields, prefix
        self._good: Sequence[int] = range(len(rows))
        if validate:
            self._good = [row for row in range(len(rows)) if self._usable(row)]
            self._refuse_too_many(max_bad_share)
        if not self._good:
            raise ValueError(f"{name}: no question in it")

    def __len__(self) -> int:
        return len(self._good)

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < len(self):
            raise IndexError(f"item {index} of {len(self)}")
        return self._prompt(self._good[index])

    def _prompt(self, row: int) -> Prompt:
        number = self._rows.number(row)
        try:
            return self._fields.prompt(self._rows[row], f"{self._prefix}:{number}")
        except RowError as error:
            raise RowError(f"{self.name}, {self._rows.unit} {number}: {error}") from error

    def _usable(self, row: int) -> bool:
        try:
            self._prompt(row)
        except RowError as error:
            self.bad.append(BadRow(self._rows.number(row), str(error)))
            return False
        return True

    def _refuse_too_many(self, max_bad_share: float, shown: int = 5) -> None:
        total = len(self._rows)
        if len(self.bad) > max_bad_share * total:
            listed = "; ".join(row.reason for row in self.bad[:shown]) + ("; ..." if len(self.bad) > shown else "")
            raise ValueError(
                f"{self.name}: {len(self.bad)} of {total} rows cannot be used, more than "
                f"max_bad_share={max_bad_share:g} allows; mend or remove them, or raise max_bad_share: {listed}"
            )
        if self.bad:
            log.warning("%s: %d of %d rows cannot be used and are left out:", self.name, len(self.bad), total)
        for row in self.bad:
            log.warning("  %s", row.reason)

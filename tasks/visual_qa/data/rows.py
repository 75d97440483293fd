"""Rows of the user's data, as dictionaries, to prompts: one mapping and one check for files and for Hugging Face."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from mmrl.errors import UserError
from mmrl.rollouts import Prompt
from mmrl.runtime.jsonl import RowError, check_finite, check_value
from mmrl.runtime.progress import display
from mmrl.tasks.visual_qa import verdicts
from mmrl.tasks.visual_qa.data.bounds import MAX_FRAMES
from mmrl.tasks.visual_qa.data.columns import Columns
from mmrl.tasks.visual_qa.data.images import ImageFiles
from mmrl.tasks.visual_qa.data.video_files import VideoFiles

MARKER, VIDEO_MARKER = "<image>", "<video>"
IMAGES = "images"  # the field of the images, unless another is named
SHOWN = 5  # bad rows in an error
CHECKED_AT_ONCE = 256  # rows, by one thread
THREADS = 8  # that wait for disks
T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be used: its number, as `Rows.number` counts, and one line naming file, row and field."""

    line: int
    reason: str


@dataclass(frozen=True)
class Fields:
    """The fields of a row: question, answer, images and videos.

    The fields of images and of videos may be absent or empty, one, or a list of them; see `ImageFiles` and `VideoFiles`
    for their values. A row without one that has a field of nearly the same name is refused: it would be a question
    without the image it is about. Of a video `max_frames` are kept, evenly spaced. columns: further ones that question
    and images are made of.
    """

    images: str = IMAGES
    problem: str = "problem"
    answer: str = "answer"
    videos: str = "videos"
    image_files: ImageFiles = ImageFiles()
    max_frames: int = MAX_FRAMES
    columns: Columns = Columns()

    @classmethod
    def named(
        cls,
        images: str | Sequence[str],
        problem: str,
        answer: str,
        videos: str,
        options: str | None,
        image_files: ImageFiles,
        max_frames: int,
    ) -> Fields:
        """images: the column of the images, or several of one image each; options: that of a question's options."""
        several = () if isinstance(images, str) else tuple(images)
        joined = images if isinstance(images, str) else IMAGES
        return cls(joined, problem, answer, videos, image_files, max_frames, Columns(options, several))

    def prompt(self, row: Any, prompt_id: str) -> Prompt:
        """Returns the prompt of a row, its images decoded to RGB; other fields of the row go to metadata.

        Raises RowError as `check`, and for an image that cannot be decoded.
        """
        text, answer, image_references, video_references = self._checked(row)
        images = tuple(self._each(self.images, "image", image_references, self.image_files.decoded))
        videos = tuple(self._each(self.videos, "video", video_references, self._video_files.decoded))
        rest = {key: value for key, value in row.items() if key not in self._used}
        return Prompt(id=prompt_id, text=text, images=images, videos=videos, answer=answer, metadata=rest)

    def check(self, row: object) -> None:
        """Raises RowError for a row that is no object, a problem or an answer that is missing or empty, markers that do
        not match the images, values that cannot be used, and an image whose header says that it cannot be."""
        _, _, image_references, video_references = self._checked(row)
        self._each(self.images, "image", image_references, self.image_files.check)
        self._each(self.videos, "video", video_references, self._video_files.check)

    @property
    def _video_files(self) -> VideoFiles:
        return VideoFiles(self.image_files, self.max_frames)

    @property
    def _used(self) -> tuple[str, ...]:
        return (self.images, self.videos, self.problem, self.answer, *self.columns.used)

    def _checked(self, row: object) -> tuple[str, Any, list[Any], list[Any]]:
        if not isinstance(row, Mapping):
            raise RowError(f"a row must be an object, not {type(row).__name__}")
        for key, value in row.items():
            check_value(key, str(key))
            check_value(value, str(key))
        row = self.columns.joined(row, self.problem, self.images, self.answer)
        problem = self._filled(row, self.problem, "problem_field")
        answer = self._filled(row, self.answer, "answer_field")
        if not isinstance(problem, str):
            raise RowError(f"field {self.problem!r} must be text, not {type(problem).__name__}")
        check_finite(answer, self.answer)
        images, videos = self._listed(row, self.images, "image_field"), self._listed(row, self.videos, "video_field")
        if problem.count(MARKER) or problem.count(VIDEO_MARKER):
            self._match(problem, MARKER, self.images, images, "images")
            self._match(problem, VIDEO_MARKER, self.videos, videos, "videos")
        return problem, answer, images, videos

    def _match(self, problem: str, marker: str, field: str, shown: list[Any], what: str) -> None:
        if (markers := problem.count(marker)) != len(shown):
            raise RowError(
                f"field {self.problem!r} has {markers} {marker} markers, field {field!r} has {len(shown)} {what}"
            )

    def _filled(self, row: Mapping[str, Any], name: str, key: str) -> Any:
        if name not in row:
            fields = ", ".join(map(str, row)) or "none"
            raise RowError(f"field {name!r} is missing (fields: {fields}); task.data.{key} names another one")
        value = row[name]
        nothing = value == [] and name != self.answer  # an answer of [] says that there is nothing to find
        if value is None or nothing or (isinstance(value, str) and not value.strip()):
            raise RowError(f"field {name!r} is empty")
        return value

    def _listed(self, row: Mapping[str, Any], field: str, key: str) -> list[Any]:
        value = row.get(field)
        if value is None or value == []:
            self._refuse_a_near_name(row, field, key)
            return []
        return list(value) if isinstance(value, (list, tuple)) else [value]

    def _refuse_a_near_name(self, row: Mapping[str, Any], field: str, key: str) -> None:
        others = [name for name, value in row.items() if value and name not in self._used]
        if near := difflib.get_close_matches(field, others, n=1, cutoff=0.8):
            raise RowError(f"field {field!r} is missing, but there is {near[0]!r}: set task.data.{key}={near[0]}")

    def _each(self, field: str, what: str, shown: Sequence[Any], function: Callable[[object], T]) -> list[T]:
        values = []
        for index, one in enumerate(shown):
            try:
                values.append(function(one))
            except RowError as error:
                raise RowError(f"field {field!r}, {what} {index}: {error}") from None
        return values


class Rows(Protocol):
    """Rows by index, read when asked for, by several threads at once; `unit` is what `number` counts, for messages:
    'line 7', 'row 7'. `stamp` changes when the rows do; None where that cannot be known."""

    unit: str

    def __len__(self) -> int: ...
    def __getitem__(self, row: int, /) -> object: ...
    def number(self, row: int) -> int: ...
    def stamp(self) -> list[Any] | None: ...


class Mapped(Protocol):
    """A mapping of rows to prompts: a dataclass whose fields key the verdict on rows. Both methods raise RowError."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def prompt(self, row: Any, prompt_id: str) -> Prompt: ...
    def check(self, row: object) -> None: ...


class RowSource:
    """Prompts from rows: a pass that checks every row and holds none of them, then lazy access to the good ones.

    The pass reads the rows and the headers of their images; its verdict is cached for the next start with the same
    file (see `verdicts`). Bad rows are left out, counted and listed in `bad`. Images are decoded when they are
    used: a row that turns out bad then, or was never checked (`validate=False`), is left out from there on, and the
    next good row takes its place.

    Raises ValueError where the share of bad rows exceeds `max_bad_share` and where no row is left; UserError for the
    first when a prompt is asked for.
    """

    def __init__(self, rows: Rows, fields: Mapped, *, name: str, prefix: str, max_bad_share: float, validate: bool):
        if not 0 <= max_bad_share <= 1:
            raise ValueError(f"max_bad_share must lie in 0 .. 1, not {max_bad_share}")
        self.name, self.max_bad_share = name, max_bad_share
        self._rows, self._fields, self._prefix = rows, fields, prefix
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

    def _prompt(self, row: int) -> Prompt:
        return self._fields.prompt(self._rows[row], f"{self._prefix}:{self._rows.number(row)}")

    def _lose(self, row: int, reason: str) -> None:
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

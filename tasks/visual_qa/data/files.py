"""Questions in the user's own files. All rows are checked once when a file is opened."""

from __future__ import annotations

import io
from codecs import BOM_UTF8
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from mmrl.errors import UserError
from mmrl.runtime.installation import extra_command
from mmrl.runtime.jsonl import LONGEST_LINE, RowError, line_spans, parsed
from mmrl.tasks.data.bounds import GIBIBYTE, MAX_FRAMES, MAX_PIXELS, PARQUET_GIB
from mmrl.tasks.data.image_files import ImageFiles
from mmrl.tasks.data.tables import SUFFIXES, read_bytes, read_table, stem_of, suffix_of
from mmrl.tasks.visual_qa import verdicts
from mmrl.tasks.visual_qa.data.rows import Rows, RowSource
from mmrl.tasks.visual_qa.reading.fields import Fields
from mmrl.tasks.visual_qa.reading.formats import detect_format


class FileSource(RowSource):
    """Questions from a `.jsonl`, `.json`, `.csv`, `.tsv` (these also compressed to .gz) or `.parquet` file.

    Rows have the columns problem, answer and images (see `Fields`), or the format of another library (see
    `detect_format`). Construction reads each row once, with the headers of its images, and keeps only the positions of
    the good rows in memory. Access reads one line, or one row group of a Parquet file; of these `parquet_gib` GiB are
    kept. `bad` lists the rows that were left out, counted from 1; in a JSONL file blank lines count.

    Images may have up to `max_pixels` pixels and must lie below `image_root`, by default the file's folder. Prompt ids
    are '<stem>:<line>'. Raises FileNotFoundError; ValueError for another kind of file, and as `RowSource`.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        image_field: str | Sequence[str] = "images",
        problem_field: str = "problem",
        answer_field: str = "answer",
        video_field: str = "videos",
        options_field: str | None = None,
        inverted: float = 0.0,
        max_frames: int = MAX_FRAMES,
        image_root: str | Path | None = None,
        max_pixels: int = MAX_PIXELS,
        max_bad_share: float = 0.01,
        parquet_gib: float = PARQUET_GIB,
        validate: bool = True,
    ):
        """Opens the file and detects its format; see `RowSource` for the check of its rows."""
        path = Path(path)
        root = path.parent if image_root is None else Path(image_root)
        image_files = ImageFiles(root, max_pixels)
        fields = Fields.from_columns(
            image_field, problem_field, answer_field, video_field, options_field, image_files, max_frames, inverted
        )
        rows = file_rows(path, parquet_gib)
        super().__init__(
            rows,
            detect_format(fields, rows, str(path)),
            name=str(path),
            prefix=stem_of(path),
            max_bad_share=max_bad_share,
            validate=validate,
        )


def file_rows(path: Path, parquet_gib: float) -> Rows:
    """Opens a file of rows. parquet_gib: row groups of a Parquet file that stay in memory, in GiB.

    Raises FileNotFoundError, ValueError if the suffix is not supported, and UserError for a Parquet file if pyarrow is
    not installed.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file of questions")
    # suffix_of ignores a final .gz; a Parquet file cannot be compressed a second time
    if (suffix := suffix_of(path)) == ".jsonl":
        return _JsonLines(path)
    if path.suffix == ".parquet":
        return parquet_rows(path, int(parquet_gib * GIBIBYTE))
    if suffix in SUFFIXES:
        return _TableRows(path)
    raise ValueError(f"{path}: a file of questions must end in .jsonl, .parquet, {', '.join(SUFFIXES)}")


def parquet_rows(path: Path, cache_bytes: int) -> Rows:
    """Opens a Parquet file. cache_bytes: decompressed row groups that stay in memory. Raises UserError if pyarrow is
    not installed."""
    try:
        from mmrl.tasks.visual_qa import parquet
    except ModuleNotFoundError as error:
        raise UserError(f"{path}: {error}; {extra_command('parquet')}, or write it as .jsonl") from None
    return parquet.open_parquet(path, cache_bytes)


class _JsonLines:
    """Rows of a JSONL file, read by byte offset; blank lines are not rows."""

    unit = "line"

    def __init__(self, path: Path):
        self._path = path
        self._unpacked = read_bytes(path) if path.suffix == ".gz" else None
        with self._opened() as file:
            self._lines = list(line_spans(file))

    def __len__(self) -> int:
        return len(self._lines)

    def number(self, row: int) -> int:
        return self._lines[row].line

    def columns(self) -> tuple[str, ...]:
        return ()

    def stamp(self) -> list[Any]:
        return verdicts.stamp(self._path)

    def __getitem__(self, row: int) -> object:
        """Reads and parses one line. Raises RowError if it is not JSON, or too long."""
        line = self._lines[row]
        with self._opened() as file:
            file.seek(line.offset)
            text = file.read(min(line.size, LONGEST_LINE + 1))
        # the first line of a file may begin with a byte order mark
        return parsed(text if line.offset else text.removeprefix(BOM_UTF8))

    def _opened(self) -> BinaryIO:
        """Opens the file again for each access, since several processes may read it."""
        return self._path.open("rb") if self._unpacked is None else io.BytesIO(self._unpacked)


class _TableRows:
    """Rows of a table, which stay in memory."""

    def __init__(self, path: Path):
        self._path, self._table = path, read_table(path)
        self.unit = self._table.unit

    def __len__(self) -> int:
        return len(self._table.entries)

    def number(self, row: int) -> int:
        return self._table.entries[row].number

    def columns(self) -> tuple[str, ...]:
        return ()

    def stamp(self) -> list[Any]:
        return verdicts.stamp(self._path)

    def __getitem__(self, row: int) -> object:
        """Returns a row of the table. Raises RowError if it could not be read."""
        value = self._table.entries[row].value
        if isinstance(value, RowError):
            raise value
        return value

"""The user's own questions, in files, read after one pass that checks every row."""

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
from mmrl.tasks.data.tables import SUFFIXES, contents, kind_of, read_table, stem_of
from mmrl.tasks.visual_qa import verdicts
from mmrl.tasks.visual_qa.data.rows import Rows, RowSource
from mmrl.tasks.visual_qa.reading.fields import Fields
from mmrl.tasks.visual_qa.reading.shapes import shaped


class FileSource(RowSource):
    """Questions from a `.jsonl`, `.json`, `.csv`, `.tsv` (all four also packed, .gz) or `.parquet` file, of the columns
    problem, answer and images (see `Fields`) or in a shape of another library (see `shaped`).

    Construction reads every row once, with the headers of its images, and keeps none of them in memory: only the
    position of each good row. Access then reads one line, or the row group of a Parquet file, of which `parquet_gib`
    GiB are kept. `bad` lists the rows left out, counted from 1 (a blank line of a JSONL file is not a row, and counts
    as a line).

    Images may be up to `max_pixels` large and lie below `image_root`, the file's own folder unless given. Prompt ids
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
        max_frames: int = MAX_FRAMES,
        image_root: str | Path | None = None,
        max_pixels: int = MAX_PIXELS,
        max_bad_share: float = 0.01,
        parquet_gib: float = PARQUET_GIB,
        validate: bool = True,
    ):
        path = Path(path)
        root = path.parent if image_root is None else Path(image_root)
        image_files = ImageFiles(root, max_pixels)
        fields = Fields.named(
            image_field, problem_field, answer_field, video_field, options_field, image_files, max_frames
        )
        rows = file_rows(path, parquet_gib)
        super().__init__(
            rows,
            shaped(fields, rows, str(path)),
            name=str(path),
            prefix=stem_of(path),
            max_bad_share=max_bad_share,
            validate=validate,
        )


def file_rows(path: Path, parquet_gib: float) -> Rows:
    """Opens the rows of a file of any kind that is read. Raises FileNotFoundError, ValueError for another kind of file,
    and UserError for a Parquet file if pyarrow is not installed."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file of questions")
    if (kind := kind_of(path)) == ".jsonl":
        return _JsonLines(path)
    if path.suffix == ".parquet":
        return parquet_rows(path, int(parquet_gib * GIBIBYTE))
    if kind in SUFFIXES:
        return _TableRows(path)
    raise ValueError(f"{path}: a file of questions ends in .jsonl, .parquet, {', '.join(SUFFIXES)}")


def parquet_rows(path: Path, keep: int) -> Rows:
    """Opens a Parquet file. keep: bytes of unpacked row groups that stay in memory. Raises UserError without
    pyarrow."""
    try:
        from mmrl.tasks.visual_qa import parquet
    except ModuleNotFoundError as error:
        raise UserError(f"{path}: {error}; {extra_command('parquet')}, or write it as .jsonl") from None
    return parquet.opened(path, keep)


class _JsonLines:
    """Rows of a JSONL file by byte offset; blank lines are not rows."""

    unit = "line"

    def __init__(self, path: Path):
        self._path = path
        self._unpacked = contents(path) if path.suffix == ".gz" else None
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
        line = self._lines[row]
        with self._opened() as file:
            file.seek(line.offset)
            text = file.read(min(line.size, LONGEST_LINE + 1))
        return parsed(text if line.offset else text.removeprefix(BOM_UTF8))

    def _opened(self) -> BinaryIO:
        """Opens the file anew: a source may be read from several processes."""
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
        value = self._table.entries[row].value
        if isinstance(value, RowError):
            raise value
        return value

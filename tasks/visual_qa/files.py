"""The user's own questions, in JSONL or Parquet, read lazily after one pass that checks every row."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from tasks.visual_qa.rows import Fields, RowError, Rows, RowSource


class FileSource(RowSource):
    """Questions from a `.jsonl` or `.parquet` file, in the form in which Geometry3K is distributed (see `Fields`).

    Construction reads every row once, pictures included, and holds none of them: only where each good row lies. Access
    then reads one line, or one row group of which the latest is kept. `bad` lists the rows left out, counted from 1 (a
    blank line of a JSONL file is no row, and counts as a line).

    `image_root` is the folder of relative picture paths, the file's own unless given. Prompt ids are '<stem>:<line>'.
    Raises FileNotFoundError; ValueError for another kind of file, and as `RowSource`.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        image_field: str = "images",
        problem_field: str = "problem",
        answer_field: str = "answer",
        image_root: str | Path | None = None,
        max_bad_share: float = 0.01,
        validate: bool = True,
    ):
        path = Path(path)
        root = path.parent if image_root is None else Path(image_root)
        fields = Fields(image_field, problem_field, answer_field, root)
        super().__init__(
            _rows(path), fields, name=str(path), prefix=path.stem, max_bad_share=max_bad_share, validate=validate
        )


def _rows(path: Path) -> Rows:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file of questions")
    if path.suffix == ".jsonl":
        return _JsonLines(path)
    if path.suffix == ".parquet":
        try:
            return _Parquet(path)
        except pa.ArrowInvalid as error:
            raise ValueError(f"{path}: not a Parquet file: {error}") from error
    raise ValueError(f"{path}: a file of questions ends in .jsonl or .parquet")


class _JsonLines:
    """Rows of a JSONL file by byte offset; blank lines are no rows."""

    unit = "line"

    def __init__(self, path: Path):
        self._path = path
        with path.open("rb") as file:
            self._places = [(line, offset) for line, offset, text in _lines(file) if text.strip()]

    def __len__(self) -> int:
        return len(self._places)

    def number(self, row: int) -> int:
        return self._places[row][0]

    def __getitem__(self, row: int) -> Any:
        with self._path.open("rb") as file:  # opened anew: a source may be read from several processes
            file.seek(self._places[row][1])
            text = file.readline()
        try:
            return json.loads(text)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise RowError(f"not JSON: {error}") from error


def _lines(file: BinaryIO) -> Iterator[tuple[int, int, bytes]]:
    offset = 0
    for number, text in enumerate(file, start=1):
        yield number, offset, text
        offset += len(text)


class _Parquet:
    """Rows of a Parquet file; the row group read last is kept as Arrow memory."""

    unit = "row"

    def __init__(self, path: Path):
        self._file = pq.ParquetFile(path)
        metadata = self._file.metadata
        sizes = (metadata.row_group(group).num_rows for group in range(metadata.num_row_groups))
        self._starts = [0, *accumulate(sizes)]
        self._held: tuple[int, pa.Table | None] = (-1, None)

    def __len__(self) -> int:
        return self._starts[-1]

    def number(self, row: int) -> int:
        return row + 1

    def __getitem__(self, row: int) -> Any:
        group = bisect_right(self._starts, row) - 1
        if self._held[0] != group:
            self._held = (group, self._file.read_row_group(group))
        table = self._held[1]
        assert table is not None
        return table.slice(row - self._starts[group], 1).to_pylist()[0]

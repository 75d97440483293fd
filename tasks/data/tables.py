"""Rows of small text files, CSV, TSV and JSON lists, which are read whole."""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from codecs import BOM_UTF8
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmrl.runtime.jsonl import LONGEST_LINE, RowError, parsed

DELIMITERS = {".csv": ",", ".tsv": "\t"}
SUFFIXES = (*DELIMITERS, ".json")
UNPACKED = 2 << 30  # bytes that a file may unpack to


@dataclass(frozen=True)
class TableEntry:
    """One row of a table: its number, of the line for tables of lines, and its value, or why it has none."""

    number: int
    value: Any


@dataclass(frozen=True)
class Table:
    """The rows of a file. unit: what their numbers count, line or row."""

    unit: str
    entries: tuple[TableEntry, ...]


def kind_of(path: Path) -> str:
    """Returns the suffix of a file, without .gz."""
    return Path(path.stem).suffix if path.suffix == ".gz" else path.suffix


def stem_of(path: Path) -> str:
    """Returns the name of a file without its kind."""
    return Path(path.stem).stem if path.suffix == ".gz" else path.stem


def contents(path: Path) -> bytes:
    """Returns all bytes of a file, unpacked where its name ends in .gz. Raises ValueError for one that is not a gzip
    file, or unpacks to more than UNPACKED."""
    if path.suffix != ".gz":
        return path.read_bytes()
    try:
        with gzip.open(path) as file:
            data = file.read(UNPACKED + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: no gzip file: {error}") from None
    if len(data) > UNPACKED:
        raise ValueError(f"{path}: it unpacks to more than {UNPACKED >> 30} GiB; unpack it, and name the file itself")
    return data


def read_table(path: Path) -> Table:
    """Reads a .csv, .tsv or .json file, also packed with .gz behind. A row that cannot be used has a RowError as its
    value.

    A .json file holds a list of objects, or one object on each line. Raises ValueError for a file that cannot be read
    as a whole.
    """
    if (kind := kind_of(path)) in DELIMITERS:
        return Table("line", tuple(_delimited(path, DELIMITERS[kind])))
    data = contents(path)
    if not data.removeprefix(BOM_UTF8).lstrip().startswith(b"["):
        return Table("line", tuple(_lines(path, data)))
    try:
        rows = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    return Table("row", tuple(TableEntry(number, row) for number, row in enumerate(rows, 1)))


def _lines(path: Path, data: bytes) -> Iterator[TableEntry]:
    """Yields the objects of a .json file that has one on each line. Raises ValueError for a file of another form."""
    lines = [(n, line) for n, line in enumerate(data.removeprefix(BOM_UTF8).splitlines(), 1) if line.strip()]
    if not lines or not _is_row(lines[0][1]):
        raise ValueError(
            f"{path}: a .json file of rows is a list of objects, [...], or one object on each line; write the list "
            "that it holds to a file of its own"
        )
    for number, line in lines:
        try:
            yield TableEntry(number, parsed(line))
        except RowError as error:
            yield TableEntry(number, error)


def _is_row(line: bytes) -> bool:
    try:
        return isinstance(parsed(line), dict)
    except RowError:
        return False


def _delimited(path: Path, delimiter: str) -> Iterator[TableEntry]:
    """Yields the rows of a CSV or TSV file as mappings by its header, with the number of their first line. Raises
    ValueError for a broken quote."""
    try:
        text = contents(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8: {error}; save it as UTF-8") from None
    csv.field_size_limit(LONGEST_LINE)  # images as text are longer than the 128 KiB that are usual
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    header: list[str] | None = None
    start = 1
    while True:
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise ValueError(f"{path}, line {start}: {error}; a quote inside a quoted cell is written twice") from None
        if cells is None:
            return
        if header is None and any(cell.strip() for cell in cells):
            header = _header(path, cells, delimiter)
        elif header is not None and any(cell.strip() for cell in cells):
            yield TableEntry(start, _cells(header, cells, delimiter))
        start = reader.line_num + 1


def _header(path: Path, cells: list[str], delimiter: str) -> list[str]:
    """Returns the column names. Raises ValueError for a name that occurs twice, and for another delimiter."""
    names = [cell.strip() for cell in cells]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"{path}: two columns are named {twice!r}; give one of them another name")
    other = next((sign for sign in ";\t,|" if sign != delimiter and sign in names[0]), None)
    if len(names) == 1 and other is not None:
        raise ValueError(f"{path}: its one column is {names[0]!r}; write {delimiter!r} between columns, not {other!r}")
    return names


def _cells(header: list[str], cells: list[str], delimiter: str) -> dict[str, str] | RowError:
    """Returns a row as a mapping by the header, or the RowError for another number of cells."""
    if len(cells) != len(header):
        return RowError(
            f"it has {len(cells)} columns, and the header {len(header)}; put a cell that contains {delimiter!r} or a "
            "new line in double quotes"
        )
    return dict(zip(header, cells, strict=True))

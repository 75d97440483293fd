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
MAX_UNPACKED = 2 << 30  # bytes that a .gz file may decompress to


@dataclass(frozen=True)
class TableEntry:
    """One row of a table: its number (line or row, from 1), and its value, or a RowError if it cannot be read."""

    number: int
    value: Any


@dataclass(frozen=True)
class Table:
    """The rows of a file. unit: what their numbers count, line or row."""

    unit: str
    entries: tuple[TableEntry, ...]


def suffix_of(path: Path) -> str:
    """Returns the suffix of a file; a .gz at the end is ignored: rows.csv.gz has the suffix .csv."""
    return Path(path.stem).suffix if path.suffix == ".gz" else path.suffix


def stem_of(path: Path) -> str:
    """Returns the name of a file without its suffix and .gz."""
    return Path(path.stem).stem if path.suffix == ".gz" else path.stem


def read_bytes(path: Path) -> bytes:
    """Reads a file, and decompresses it if its name ends in .gz. Raises ValueError if that is not a gzip file, or
    decompresses to more than MAX_UNPACKED bytes."""
    if path.suffix != ".gz":
        return path.read_bytes()
    try:
        with gzip.open(path) as file:
            data = file.read(MAX_UNPACKED + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: not a gzip file: {error}") from None
    if len(data) > MAX_UNPACKED:
        raise ValueError(
            f"{path}: decompresses to more than {MAX_UNPACKED >> 30} GiB; decompress it, and name the file without .gz"
        )
    return data


def read_table(path: Path) -> Table:
    """Reads a .csv, .tsv or .json file, also one compressed to .gz.

    A .json file holds a list of objects, or one object on each line. A row that cannot be read has a RowError as its
    value. Raises ValueError if the file as a whole cannot be read.
    """
    if (suffix := suffix_of(path)) in DELIMITERS:
        return Table("line", tuple(_delimited_rows(path, DELIMITERS[suffix])))
    data = read_bytes(path)
    if not data.removeprefix(BOM_UTF8).lstrip().startswith(b"["):
        return Table("line", tuple(_json_lines(path, data)))
    try:
        rows = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    return Table("row", tuple(TableEntry(number, row) for number, row in enumerate(rows, 1)))


def _json_lines(path: Path, data: bytes) -> Iterator[TableEntry]:
    """Yields the objects of a .json file that has one on each line. Raises ValueError for a file of another form."""
    lines = [(n, line) for n, line in enumerate(data.removeprefix(BOM_UTF8).splitlines(), 1) if line.strip()]
    if not lines or not _is_object(lines[0][1]):
        raise ValueError(
            f"{path}: a .json file of rows must be a list of objects, [...], or have one object on each line; if the "
            "rows are a list inside of an object, write that list to a file"
        )
    for number, line in lines:
        try:
            yield TableEntry(number, parsed(line))
        except RowError as error:
            yield TableEntry(number, error)


def _is_object(line: bytes) -> bool:
    """Returns whether a line is a JSON object."""
    try:
        return isinstance(parsed(line), dict)
    except RowError:
        return False


def _delimited_rows(path: Path, delimiter: str) -> Iterator[TableEntry]:
    """Yields the rows of a CSV or TSV file as mappings from column names, numbered by their first line. Raises
    ValueError if the file is not UTF-8, has a bad header or an unclosed quote."""
    try:
        text = read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8: {error}; save it as UTF-8") from None
    csv.field_size_limit(LONGEST_LINE)  # images in base64 are longer than csv's limit of 128 KiB
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    header: list[str] | None = None
    start = 1
    while True:
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise ValueError(f"{path}, line {start}: {error}; write a quote inside a quoted cell twice") from None
        if cells is None:
            return
        if any(cell.strip() for cell in cells):
            if header is None:
                header = _header(path, cells, delimiter)
            else:
                yield TableEntry(start, _row(header, cells, delimiter))
        start = reader.line_num + 1


def _header(path: Path, cells: list[str], delimiter: str) -> list[str]:
    """Returns the column names. Raises ValueError if a name occurs twice, or the file seems to use another
    delimiter."""
    names = [cell.strip() for cell in cells]
    duplicate = next((name for name in names if names.count(name) > 1), None)
    if duplicate is not None:
        raise ValueError(f"{path}: two columns are named {duplicate!r}; rename one of them")
    other = next((sign for sign in ";\t,|" if sign != delimiter and sign in names[0]), None)
    if len(names) == 1 and other is not None:
        raise ValueError(f"{path}: its one column is {names[0]!r}; write {delimiter!r} between columns, not {other!r}")
    return names


def _row(header: list[str], cells: list[str], delimiter: str) -> dict[str, str] | RowError:
    """Returns a row as a mapping from column names, or a RowError if it has more or fewer cells than the header."""
    if len(cells) != len(header):
        return RowError(
            f"the row has {len(cells)} columns, the header {len(header)}; put a cell that contains {delimiter!r} or a "
            "new line in double quotes"
        )
    return dict(zip(header, cells, strict=True))

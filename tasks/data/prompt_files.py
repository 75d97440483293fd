"""The user's own prompts in files: text with one a line, JSONL, JSON lists, CSV, TSV, Parquet, and data sets of Hugging
Face that were saved to a folder; text files also packed by gzip."""

from __future__ import annotations

import codecs
import importlib.util
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from mmrl.errors import UserError
from mmrl.rollouts import Prompt
from mmrl.runtime.installation import extra_command
from mmrl.runtime.jsonl import RowError, check_length, check_value, parsed
from mmrl.tasks.data.tables import SUFFIXES, TableEntry, contents, kind_of, read_table, stem_of

MAX_ROWS = 10_000_000  # of a Parquet file or a data set, which are held in memory
Check = Callable[[Mapping[str, Any], str], None]  # of a row and its prompt; raises RowError
T = TypeVar("T")
log = logging.getLogger(__name__)


def load_prompts(
    path: str | Path, *, field: str = "prompt", check: Check | None = None, max_bad_share: float = 0.0
) -> list[Prompt]:
    """Reads prompts: each line of a `.txt` file, or the column `field` of rows, whose other columns go to metadata.

    Rows are those of .jsonl, .json, .csv, .tsv or .parquet, or of a folder that `save_to_disk` wrote; .txt, .jsonl,
    .json, .csv and .tsv may end in .gz. Blank lines are passed over, and count. Ids are '<stem>:<number>', counted from
    1. check: what else a row must hold.

    Rows that cannot be used are left out and logged, by file and number. Raises FileNotFoundError; ValueError for
    another kind of file, for a share of bad rows above `max_bad_share`, and where no prompt is left.
    """
    path, prompts, bad, total = Path(path), [], [], 0
    unit, rows = prompt_rows(path, field)
    for entry in rows:
        total += 1
        try:
            prompts.append(_prompt(entry, f"{stem_of(path)}:{entry.number}", field, check))
        except RowError as error:
            bad.append(f"{path}, {unit} {entry.number}: {error}")
    if len(bad) > max_bad_share * total:
        listed = "; ".join(bad[:5]) + ("; ..." if len(bad) > 5 else "")
        raise ValueError(
            f"{path}: {len(bad)} of {total} rows cannot be used, more than max_bad_share={max_bad_share:g} allows; "
            f"mend or remove them, or raise max_bad_share: {listed}"
        )
    for reason in bad:
        log.warning("left out: %s", reason)
    if not prompts:
        raise ValueError(f"{path}: no prompt in it")
    return prompts


def prompt_rows(path: Path, field: str) -> tuple[str, Iterator[TableEntry]]:
    """Returns what rows are counted in, line or row, and the rows; those of a .txt file have the key `field` alone."""
    if path.is_dir():
        return "row", _saved(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file of prompts")
    kind = kind_of(path)
    if kind in (".txt", ".jsonl"):
        return "line", _lines(path, kind, field)
    if kind in SUFFIXES:
        table = read_table(path)
        return table.unit, iter(table.entries)
    if kind == ".parquet":
        return "row", _parquet(path)
    raise ValueError(f"{path}: a file of prompts ends in .txt, .jsonl, .parquet, {', '.join(SUFFIXES)}, or is a folder")


def _lines(path: Path, kind: str, field: str) -> Iterator[TableEntry]:
    """Yields the lines of a .jsonl or text file that are not blank; a text line becomes {field: line}."""
    for number, line in enumerate(contents(path).removeprefix(codecs.BOM_UTF8).splitlines(), 1):
        if line.strip():
            try:
                check_length(line)
                yield TableEntry(number, parsed(line) if kind == ".jsonl" else {field: line.strip().decode()})
            except UnicodeDecodeError as error:
                yield TableEntry(number, RowError(f"not UTF-8: {error}"))
            except RowError as error:
                yield TableEntry(number, error)


def _parquet(path: Path) -> Iterator[TableEntry]:
    """Yields the rows of a Parquet file, without columns that hold bytes. Raises UserError without pyarrow, ValueError
    for another file."""
    if importlib.util.find_spec("pyarrow") is None:
        raise UserError(f"{path}: a Parquet file needs pyarrow: {extra_command('parquet')}, or write it as .jsonl")
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
        _check_size(path, file.metadata.num_rows)
        names = [field.name for field in file.schema_arrow if not _holds_bytes(field.type)]
        number = 0
        for batch in file.iter_batches(1024, columns=names):
            for row in batch.to_pylist():
                number += 1
                yield TableEntry(number, row)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not a Parquet file: {' '.join(str(error).split())}") from error


def _saved(path: Path) -> Iterator[TableEntry]:
    """Yields the rows of a data set that was saved to a folder."""
    if importlib.util.find_spec("datasets") is None:
        raise UserError(f"{path}: a folder of a data set needs datasets: {extra_command('huggingface')}")
    import datasets

    splits = sorted(part.name for part in path.iterdir() if (part / "dataset_info.json").is_file())
    if not (path / "dataset_info.json").is_file():
        where = f"its splits are {', '.join(str(path / split) for split in splits)}" if splits else "there is none"
        raise ValueError(f"{path}: name the folder of one split of a data set, as `save_to_disk` wrote it; {where}")
    rows = datasets.load_from_disk(str(path))
    _check_size(path, len(rows))
    arrow = rows.with_format("arrow")
    schema = arrow[:0].schema
    arrow = arrow.select_columns([field.name for field in schema if not _holds_bytes(field.type)])
    for start in range(0, len(rows), 1024):
        for offset, row in enumerate(arrow[start : start + 1024].to_pylist()):
            yield TableEntry(start + offset + 1, row)


def _check_size(path: Path, rows: int) -> None:
    if rows > MAX_ROWS:
        raise ValueError(f"{path}: {rows} rows; prompts are held in memory, of {MAX_ROWS} rows at most")


def _holds_bytes(kind: Any) -> bool:
    """Returns whether an Arrow type holds bytes, as images have them, which prompts do not need."""
    import pyarrow.types as kinds

    if kinds.is_binary(kind) or kinds.is_large_binary(kind) or kinds.is_fixed_size_binary(kind):
        return True
    return any(_holds_bytes(kind.field(index).type) for index in range(kind.num_fields))


def _prompt(entry: TableEntry, prompt_id: str, field: str, check: Check | None) -> Prompt:
    """Returns the prompt of a row: its text under `field`, all else as metadata. Raises RowError."""
    row = entry.value
    if isinstance(row, RowError):
        raise row
    if not isinstance(row, Mapping):
        raise RowError(f"a row must be an object, not {type(row).__name__}")
    for key, value in row.items():
        check_value(key, str(key))
        check_value(value, str(key))
    text = text_of(row, field, hint="; task.data.prompt_field names another one")
    if check is not None:
        check(row, text)
    return Prompt(id=prompt_id, text=text, metadata={key: value for key, value in row.items() if key != field})


def value_of(row: Mapping[str, Any], key: str, kind: type[T], name: str, where: str = "", hint: str = "") -> T:
    """Returns the value of a key. name: of `kind`, for messages; where: of the key. Raises RowError for one that is
    missing, of another kind, or empty."""
    if key not in row:
        raise RowError(f"key {where + key!r} is missing (keys: {', '.join(map(str, row)) or 'none'}){hint}")
    value = row[key]
    if not isinstance(value, kind):
        raise RowError(f"key {where + key!r} must be {name}, not {type(value).__name__}")
    if kind is not int and not (value.strip() if isinstance(value, str) else value):
        raise RowError(f"key {where + key!r} is empty")
    return value


def text_of(row: Mapping[str, Any], key: str, where: str = "", hint: str = "") -> str:
    """Returns the text of a key without white space around it. hint: of what to do where it is missing."""
    return value_of(row, key, str, "text", where, hint).strip()

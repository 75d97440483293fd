"""Prompts from the user's own files: plain text (one prompt a line), JSONL, JSON lists, CSV, TSV, Parquet, and Hugging
Face datasets that were saved to a folder. All but Parquet and folders may be compressed by gzip."""

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
from mmrl.tasks.data.tables import SUFFIXES, TableEntry, read_bytes, read_table, stem_of, suffix_of

MAX_ROWS = 10_000_000  # rows of a Parquet file or a dataset, which are held in memory
Check = Callable[[Mapping[str, Any], str], None]  # gets a row and its prompt's text; raises RowError
T = TypeVar("T")
log = logging.getLogger(__name__)


def load_prompts(
    path: str | Path, *, field: str = "prompt", check: Check | None = None, max_bad_share: float = 0.0
) -> list[Prompt]:
    """Reads the prompts of a file or of a dataset's folder.

    A prompt is a line of a .txt file, or the column `field` of a row; the row's other columns go to metadata. Rows come
    from a .jsonl, .json, .csv, .tsv or .parquet file, or from a folder that `save_to_disk` wrote. Ids are
    '<stem>:<number>', where lines are counted from 1, blank ones included. check: is called with each row and its
    text, and raises RowError if the row lacks what else the caller needs; None: nothing else is needed.

    Rows that cannot be used are logged and left out. Raises FileNotFoundError, and ValueError for another kind of file,
    for a share of bad rows above `max_bad_share`, and if no prompt is left.
    """
    path, prompts, bad, num_rows = Path(path), [], [], 0
    unit, rows = prompt_rows(path, field)
    for entry in rows:
        num_rows += 1
        try:
            prompts.append(_prompt(entry, f"{stem_of(path)}:{entry.number}", field, check))
        except RowError as error:
            bad.append(f"{path}, {unit} {entry.number}: {error}")
    if len(bad) > max_bad_share * num_rows:
        listed = "; ".join(bad[:5]) + ("; ..." if len(bad) > 5 else "")
        raise ValueError(
            f"{path}: {len(bad)} of {num_rows} rows cannot be used, more than max_bad_share={max_bad_share:g} allows; "
            f"fix or remove them, or raise max_bad_share: {listed}"
        )
    for reason in bad:
        log.warning("left out: %s", reason)
    if not prompts:
        raise ValueError(f"{path}: the file holds no prompt")
    return prompts


def prompt_rows(path: Path, field: str) -> tuple[str, Iterator[TableEntry]]:
    """Opens a file of prompts. Returns "line" or "row", which is what the entries' numbers count, and the entries. A
    line of a .txt file becomes a row with the one key `field`."""
    if path.is_dir():
        return "row", _dataset_rows(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file of prompts")
    suffix = suffix_of(path)
    if suffix in (".txt", ".jsonl"):
        return "line", _line_rows(path, suffix, field)
    if suffix in SUFFIXES:
        table = read_table(path)
        return table.unit, iter(table.entries)
    if suffix == ".parquet":
        return "row", _parquet_rows(path)
    raise ValueError(
        f"{path}: prompts are read from a folder that save_to_disk wrote, or from a file that ends in .txt, .jsonl, "
        f".parquet, {', '.join(SUFFIXES)}"
    )


def _line_rows(path: Path, suffix: str, field: str) -> Iterator[TableEntry]:
    """Yields the lines of a .jsonl or .txt file that are not blank; a line of text becomes {field: line}."""
    for number, line in enumerate(read_bytes(path).removeprefix(codecs.BOM_UTF8).splitlines(), 1):
        if line.strip():
            try:
                check_length(line)
                yield TableEntry(number, parsed(line) if suffix == ".jsonl" else {field: line.strip().decode()})
            except UnicodeDecodeError as error:
                yield TableEntry(number, RowError(f"not UTF-8: {error}"))
            except RowError as error:
                yield TableEntry(number, error)


def _parquet_rows(path: Path) -> Iterator[TableEntry]:
    """Yields the rows of a Parquet file, without columns that hold bytes. Raises UserError if pyarrow is not installed,
    ValueError if it is not a Parquet file."""
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


def _dataset_rows(path: Path) -> Iterator[TableEntry]:
    """Yields the rows of a dataset that `save_to_disk` wrote to a folder, without columns that hold bytes. Raises
    UserError if the package datasets is not installed, ValueError if the folder is not one split."""
    if importlib.util.find_spec("datasets") is None:
        raise UserError(f"{path}: a folder of a dataset needs datasets: {extra_command('huggingface')}")
    import datasets

    splits = sorted(part.name for part in path.iterdir() if (part / "dataset_info.json").is_file())
    if not (path / "dataset_info.json").is_file():
        splits_text = (
            f"its splits are {', '.join(str(path / split) for split in splits)}" if splits else "it has no split"
        )
        raise ValueError(
            f"{path}: name the folder of one split of a dataset, as `save_to_disk` wrote it; {splits_text}"
        )
    rows = datasets.load_from_disk(str(path))
    _check_size(path, len(rows))
    arrow = rows.with_format("arrow")
    schema = arrow[:0].schema
    arrow = arrow.select_columns([field.name for field in schema if not _holds_bytes(field.type)])
    for start in range(0, len(rows), 1024):
        for offset, row in enumerate(arrow[start : start + 1024].to_pylist()):
            yield TableEntry(start + offset + 1, row)


def _check_size(path: Path, num_rows: int) -> None:
    if num_rows > MAX_ROWS:
        raise ValueError(
            f"{path}: {num_rows} rows; at most {MAX_ROWS} are read, since prompts are held in memory; split the file"
        )


def _holds_bytes(arrow_type: Any) -> bool:
    """Returns whether an Arrow type holds bytes, also in a nested field. Such columns, images for instance, are not
    needed in prompts."""
    from pyarrow import types

    if types.is_binary(arrow_type) or types.is_large_binary(arrow_type) or types.is_fixed_size_binary(arrow_type):
        return True
    return any(_holds_bytes(arrow_type.field(index).type) for index in range(arrow_type.num_fields))


def _prompt(entry: TableEntry, prompt_id: str, field: str, check: Check | None) -> Prompt:
    """Returns the prompt of a row: the column `field` is its text, the other columns are its metadata. Raises RowError
    if the row cannot be used."""
    row = entry.value
    if isinstance(row, RowError):
        raise row
    if not isinstance(row, Mapping):
        raise RowError(f"a row must be an object, not {type(row).__name__}")
    for key, value in row.items():
        check_value(key, str(key))
        check_value(value, str(key))
    text = text_of(row, field, hint="; set task.data.prompt_field to the right one")
    if check is not None:
        check(row, text)
    return Prompt(id=prompt_id, text=text, metadata={key: value for key, value in row.items() if key != field})


def value_of(
    row: Mapping[str, Any], key: str, value_type: type[T], type_name: str, parent: str = "", hint: str = ""
) -> T:
    """Returns the value of a key. Raises RowError if it is missing, empty, or not of `value_type`.

    For messages only: type_name, such as "text"; parent, the outer keys of a nested one, such as "spec."; hint, what to
    do if the key is missing.
    """
    if key not in row:
        raise RowError(f"key {parent + key!r} is missing (keys: {', '.join(map(str, row)) or 'none'}){hint}")
    value = row[key]
    if not isinstance(value, value_type):
        raise RowError(f"key {parent + key!r} must be {type_name}, not {type(value).__name__}")
    # The number 0 is a value; an empty text, list or mapping is not.
    if value_type is not int and not (value.strip() if isinstance(value, str) else value):
        raise RowError(f"key {parent + key!r} is empty")
    return value


def text_of(row: Mapping[str, Any], key: str, parent: str = "", hint: str = "") -> str:
    """Returns the text of a key, stripped. Other arguments and errors: as `value_of`."""
    return value_of(row, key, str, "text", parent, hint).strip()

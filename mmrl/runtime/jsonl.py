"""Reads JSON lines from untrusted files. A bad row raises a RowError and nothing else."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, NamedTuple

LONGEST_LINE = 64 << 20  # bytes
DEEPEST = 64  # levels of lists and objects


class RowError(ValueError):
    """An error about a row that cannot be used, in one line that names the field."""


class LineSpan(NamedTuple):
    """The position of a line: its number from 1, its offset and its size in bytes."""

    line: int
    offset: int
    size: int


def line_spans(file: BinaryIO) -> Iterator[LineSpan]:
    """Yields the spans of all lines that are not blank. Holds at most LONGEST_LINE bytes in memory."""
    line = offset = 0
    while text := file.readline(LONGEST_LINE):
        line, size, blank = line + 1, len(text), not text.strip()
        while not text.endswith(b"\n") and (text := file.readline(LONGEST_LINE)):
            size += len(text)
        if not blank:
            yield LineSpan(line, offset, size)
        offset += size


def parsed(text: bytes) -> Any:
    """Returns the JSON value of a line. Raises RowError for invalid JSON and for a line that is too long."""
    check_length(text)
    try:
        return json.loads(text)
    except UnicodeDecodeError as error:
        raise RowError(f"not JSON, for it is not UTF-8: {error}; save the file as UTF-8") from None
    except json.JSONDecodeError as error:
        raise RowError(f"not JSON: {error}") from None
    except RecursionError:
        raise RowError(f"nested more than {DEEPEST} levels deep") from None
    except ValueError as error:  # a number of thousands of digits
        raise RowError(f"cannot be parsed: {error}") from None


def check_length(text: bytes) -> None:
    """Raises RowError for a line of more than LONGEST_LINE bytes."""
    if len(text) > LONGEST_LINE:
        raise RowError(f"longer than {LONGEST_LINE >> 20} MiB")


def check_value(value: object, field: str, depth: int = 0) -> None:
    """Raises RowError naming `field` for values that fail later, when they are written, sent or computed with: text
    with half of a surrogate pair, an integer beyond the range of floats, more than DEEPEST levels."""
    if depth > DEEPEST:
        raise RowError(f"field {field!r}: nested more than {DEEPEST} levels deep")
    if isinstance(value, str):
        _check_text(value, field)
    elif isinstance(value, int):
        _check_size(value, field)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            check_value(key, field, depth + 1)
            check_value(inner, field, depth + 1)
    elif isinstance(value, list | tuple):
        for inner in value:
            check_value(inner, field, depth + 1)


def check_finite(value: object, field: str) -> None:
    """Raises RowError for a number that is NaN or infinite, which no answer equals."""
    if isinstance(value, float) and not math.isfinite(value):
        raise RowError(f"field {field!r} is {value}, which no answer equals; write a finite number")


def _check_text(text: str, field: str) -> None:
    """Raises RowError for a string with half of a surrogate pair, which UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise RowError(
            f"field {field!r}: half of a surrogate pair, {ascii(half)}, is character {error.start}; remove it"
        ) from None


def _check_size(number: int, field: str) -> None:
    """Raises RowError for an integer beyond the range of floats."""
    try:
        float(number)
    except OverflowError:
        raise RowError(
            f"field {field!r}: an integer of {number.bit_length()} bits, beyond the range of floats; write it as text"
        ) from None

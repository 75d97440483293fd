"""A cache of which rows of a file are bad, so that the same file is not checked at each start.

The key of a cached result is made of the file's name, size and modification time, the options of the check, and the
code that reads and checks rows. Images in other files are not part of it; they are checked again when they are used.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from mmrl.runtime.files import user_cache
from mmrl.version import VERSION

PARSERS = (Path(__file__).parent / "data", Path(__file__).parents[1] / "data")  # folders of the code that reads rows
MAX_BAD_ROWS = 10_000  # results with more bad rows are not cached
log = logging.getLogger(__name__)


def folder() -> Path:
    """Returns the folder of the cache: $MMRL_ROW_CACHE, or mmrl/rows in the user's cache folder."""
    return user_cache("rows", "MMRL_ROW_CACHE")


def stamp(path: Path) -> list[Any]:
    """Returns values that change when a file does: its real path, its size and its modification time."""
    stat = path.stat()
    return [os.path.realpath(path), stat.st_size, stat.st_mtime_ns]


@cache
def code_digest() -> str:
    """Returns a digest of the code in PARSERS."""
    digest = hashlib.sha256(VERSION.encode())
    for path in sorted(path for folder in PARSERS for path in folder.rglob("*.py")):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def load(key: Sequence[Any], num_rows: int) -> dict[int, str] | None:
    """Reads a cached result: the reason of each bad row, by index. Returns None if there is none for this key and
    number of rows."""
    path = _path(key)
    try:
        saved = json.loads(path.read_text())
        bad = {int(row): str(reason) for row, reason in saved["bad"]}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        log.info("the cached check %s cannot be read; rows are checked again", path)
        return None
    return bad if saved.get("count") == num_rows and all(0 <= row < num_rows for row in bad) else None


def save(key: Sequence[Any], num_rows: int, bad: dict[int, str]) -> None:
    """Writes a result to the cache, unless there are more than MAX_BAD_ROWS bad rows. If the folder cannot be
    written, the next start checks again."""
    if len(bad) > MAX_BAD_ROWS:
        return
    path = _path(key)
    draft = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps({"count": num_rows, "bad": list(bad.items())}))
        draft.replace(path)
    except OSError as error:
        log.info("%s cannot be written, so rows are checked again at the next start: %s", path, error)


def _path(key: Sequence[Any]) -> Path:
    """Returns the file of a cached result."""
    text = json.dumps([code_digest(), *key], default=str)
    return folder() / f"{hashlib.sha256(text.encode()).hexdigest()}.json"

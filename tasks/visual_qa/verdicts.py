"""Verdicts on the rows of a file, cached so that the same file is not checked again.

A verdict belongs to the file's name, size and time of change, to the options that it was checked with, and to the code
that read and checked it: a changed parser checks again. It says nothing of images in files of their own, which are
checked again when they are used.
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

PARSERS = (Path(__file__).parent / "data", Path(__file__).parents[1] / "data")  # folders of what reads rows
MOST_BAD = 10_000  # rows; a file with more is checked again
log = logging.getLogger(__name__)


def folder() -> Path:
    """Returns the folder of the verdicts: $MMRL_ROW_CACHE, or mmrl/rows in the user's cache folder."""
    return user_cache("rows", "MMRL_ROW_CACHE")


def stamp(path: Path) -> list[Any]:
    """Returns facts that change when a file does: its real path, its size and its time of change."""
    facts = path.stat()
    return [os.path.realpath(path), facts.st_size, facts.st_mtime_ns]


@cache
def code() -> str:
    """Returns a digest of the modules that read and check rows, in PARSERS."""
    digest = hashlib.sha256(VERSION.encode())
    for path in sorted(path for folder in PARSERS for path in folder.rglob("*.py")):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def recall(facts: Sequence[Any], count: int) -> dict[int, str] | None:
    """Reads the bad rows of `count`, by index, with the reason; None where there is no verdict."""
    path = _path(facts)
    try:
        saved = json.loads(path.read_text())
        bad = {int(row): str(reason) for row, reason in saved["bad"]}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        log.info("%s is not a verdict on rows; they are checked again", path)
        return None
    return bad if saved.get("count") == count and all(0 <= row < count for row in bad) else None


def remember(facts: Sequence[Any], count: int, bad: dict[int, str]) -> None:
    """Writes a verdict. If the folder cannot be written, the next start checks again."""
    if len(bad) > MOST_BAD:
        return
    path = _path(facts)
    draft = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps({"count": count, "bad": list(bad.items())}))
        draft.replace(path)
    except OSError as error:
        log.info("%s cannot be written, so rows are checked again at the next start: %s", path, error)


def _path(facts: Sequence[Any]) -> Path:
    text = json.dumps([code(), *facts], default=str)
    return folder() / f"{hashlib.sha256(text.encode()).hexdigest()}.json"

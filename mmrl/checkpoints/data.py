"""Notices data files that changed since a run began: they are recorded in RUN/data.json.

A file is known by its size and its time of change, and where these differ by a checksum of its contents; a folder by
the names and sizes of its files. Images that rows name are not part of it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

from mmrl.checkpoints.training import leaves
from mmrl.errors import UserError

RECORD = "data.json"
SECTIONS = ("data.", "demonstrations.")  # of the task, whose keys may name files
NAMING = ("train", "eval", "path", "name")  # of them, those that do
WHOLE = 1 << 30  # bytes of a file up to which all of it is read
BLOCK, BLOCKS = 1 << 20, 256  # of a larger one, evenly spread
MOST_FILES = 20_000  # of a folder
log = logging.getLogger(__name__)
Facts = dict[str, Any]


def data_files(config: dict[str, Any]) -> dict[str, Path]:
    """Returns the files and folders that the task's data is read from, by their keys. config: as a tree."""
    task = config["task"]
    if not isinstance(task, dict):  # a task without options is its kind alone
        return {}
    named = {key: value for key, value in leaves(task) if key.startswith(SECTIONS)}
    named = {key: value for key, value in named.items() if key.rpartition(".")[2] in NAMING}
    paths = {f"task.{key}": Path(value) for key, value in named.items() if isinstance(value, str) and value}
    return {key: path for key, path in paths.items() if path.exists()}


def record(folder: Path, config: dict[str, Any]) -> None:
    """Writes what the data files are now; of those that were recorded and have not changed, nothing is read."""
    before = _recorded(folder)
    known = {key: (path, before.get(key)) for key, path in data_files(config).items()}
    now = {key: old if old and _same_stamp(old, path) else facts(path) for key, (path, old) in known.items()}
    if now != before:
        draft = folder / f"{RECORD}.pending"
        draft.write_text(json.dumps(now, indent=2))
        draft.replace(folder / RECORD)


def check_data(folder: Path, config: dict[str, Any]) -> None:
    """Raises UserError where data files are not what they were when the run began, unless checkpoint.changed_data says
    that this is known."""
    before = _recorded(folder)
    for key, path in data_files(config).items():
        old = before.get(key)
        if old is None or _same_stamp(old, path) or (now := facts(path))["sha256"] == old["sha256"]:
            continue
        sizes = f"{old['size']:,} bytes then, {now['size']:,} now"
        if config["checkpoint"]["changed_data"] == "accept":
            log.warning("%s=%s has changed since run_dir=%s began (%s), and it goes on", key, path, folder, sizes)
        else:
            raise UserError(
                f"{key}={path} has changed since run_dir={folder} began ({sizes}), so its rows differ from those "
                "that were sampled and evaluated; restore it, name another run_dir, or set "
                "checkpoint.changed_data=accept"
            )


def facts(path: Path) -> Facts:
    """Returns size, time of change and checksum of a file; of a folder, those of its listing."""
    if path.is_dir():
        return _folder_facts(path)
    stat = path.stat()
    return {"size": stat.st_size, "modified": stat.st_mtime_ns, "sha256": _checksum(path, stat.st_size)}


def _folder_facts(path: Path) -> Facts:
    sizes: dict[str, int] = {}
    for parent, _, names in sorted(os.walk(path)):
        files = [Path(parent) / name for name in names]
        sizes |= {str(file.relative_to(path)): file.stat().st_size for file in files}
        if len(sizes) > MOST_FILES:
            break
    text = json.dumps(sorted(sizes.items())[:MOST_FILES])
    return {"size": sum(sizes.values()), "modified": None, "sha256": hashlib.sha256(text.encode()).hexdigest()}


def _checksum(path: Path, size: int) -> str:
    """Returns a SHA-256 of a file's size and content; of a large file, of BLOCKS evenly spaced blocks."""
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        starts = range(0, size, BLOCK) if size <= WHOLE else [i * (size - BLOCK) // (BLOCKS - 1) for i in range(BLOCKS)]
        for start in starts:
            file.seek(start)
            digest.update(file.read(BLOCK))
    return digest.hexdigest()


def _same_stamp(old: Facts, path: Path) -> bool:
    """Returns whether a file has the size and the time of change that were recorded; never for a folder."""
    stat = path.stat()
    return not path.is_dir() and (old["size"], old["modified"]) == (stat.st_size, stat.st_mtime_ns)


def _recorded(folder: Path) -> dict[str, Facts]:
    try:
        recorded = json.loads((folder / RECORD).read_text())
    except (OSError, ValueError):
        return {}
    return recorded if isinstance(recorded, dict) else {}

"""Notices data files that changed since a run began: they are recorded in RUN/data.json.

A file is known by its size and its time of change, and where these differ by a checksum of its contents; a folder by
the names and sizes of its files. Images that rows name are not checked.
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
SECTIONS = ("data.", "demonstrations.")  # sections of the task that name data files
FILE_KEYS = ("train", "eval", "path", "name")  # keys of these sections whose value may be a path
MAX_FULL_READ = 1 << 30  # bytes; the checksum of a larger file covers some blocks only
BLOCK, BLOCKS = 1 << 20, 256  # bytes of such a block, and the number of blocks, evenly spaced
MAX_FILES = 20_000  # files of a folder that its checksum covers
log = logging.getLogger(__name__)
Fingerprint = dict[str, Any]  # "size" in bytes, "modified" in nanoseconds or None for a folder, "sha256"


def data_files(config: dict[str, Any]) -> dict[str, Path]:
    """Returns the files and folders that the task's data is read from, by configuration key. config: as nested
    mappings."""
    task = config["task"]
    if not isinstance(task, dict):  # a task without options is only the name of its type
        return {}
    named = {key: value for key, value in leaves(task) if key.startswith(SECTIONS)}
    named = {key: value for key, value in named.items() if key.rpartition(".")[2] in FILE_KEYS}
    paths = {f"task.{key}": Path(value) for key, value in named.items() if isinstance(value, str) and value}
    return {key: path for key, path in paths.items() if path.exists()}


def record(folder: Path, config: dict[str, Any]) -> None:
    """Writes the fingerprints of the data files to RUN/data.json. Files whose size and time of change are as recorded
    are not read."""
    recorded = _recorded(folder)
    present = {}
    for key, path in data_files(config).items():
        old = recorded.get(key)
        present[key] = old if old and _same_stamp(old, path) else fingerprint(path)
    if present != recorded:
        pending = folder / f"{RECORD}.pending"
        pending.write_text(json.dumps(present, indent=2))
        pending.replace(folder / RECORD)


def check_data(folder: Path, config: dict[str, Any]) -> None:
    """Raises UserError for a data file that has changed since the run began; with checkpoint.changed_data=accept logs a
    warning instead."""
    recorded = _recorded(folder)
    for key, path in data_files(config).items():
        old = recorded.get(key)
        if old is None or _same_stamp(old, path) or (now := fingerprint(path))["sha256"] == old["sha256"]:
            continue
        sizes = f"{old['size']:,} bytes then, {now['size']:,} now"
        if config["checkpoint"]["changed_data"] == "accept":
            log.warning("%s=%s has changed since run_dir=%s began (%s); the run continues", key, path, folder, sizes)
        else:
            raise UserError(
                f"{key}={path} has changed since run_dir={folder} began ({sizes}), so its rows differ from those "
                "that were sampled and evaluated; restore the file, name another run_dir, or set "
                "checkpoint.changed_data=accept"
            )


def fingerprint(path: Path) -> Fingerprint:
    """Returns size, time of change and checksum of a file; for a folder, the total size and a checksum of the names and
    sizes of its files."""
    if path.is_dir():
        return _folder_fingerprint(path)
    stat = path.stat()
    return {"size": stat.st_size, "modified": stat.st_mtime_ns, "sha256": _checksum(path, stat.st_size)}


def _folder_fingerprint(path: Path) -> Fingerprint:
    """Returns the fingerprint of a folder, from at most MAX_FILES files; their contents are not read."""
    sizes: dict[str, int] = {}
    for parent, _, names in sorted(os.walk(path)):
        files = [Path(parent) / name for name in names]
        sizes |= {str(file.relative_to(path)): file.stat().st_size for file in files}
        if len(sizes) > MAX_FILES:
            break
    text = json.dumps(sorted(sizes.items())[:MAX_FILES])
    return {"size": sum(sizes.values()), "modified": None, "sha256": hashlib.sha256(text.encode()).hexdigest()}


def _checksum(path: Path, size: int) -> str:
    """Returns a SHA-256 of a file's size and content; of a large file, of BLOCKS evenly spaced blocks."""
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        if size <= MAX_FULL_READ:
            starts = list(range(0, size, BLOCK))
        else:
            starts = [i * (size - BLOCK) // (BLOCKS - 1) for i in range(BLOCKS)]
        for start in starts:
            file.seek(start)
            digest.update(file.read(BLOCK))
    return digest.hexdigest()


def _same_stamp(old: Fingerprint, path: Path) -> bool:
    """Returns whether a file has the recorded size and time of change; always False for a folder."""
    stat = path.stat()
    return not path.is_dir() and (old["size"], old["modified"]) == (stat.st_size, stat.st_mtime_ns)


def _recorded(folder: Path) -> dict[str, Fingerprint]:
    """Returns the fingerprints in RUN/data.json by configuration key; {} where there are none."""
    try:
        recorded = json.loads((folder / RECORD).read_text())
    except (OSError, ValueError):
        return {}
    return recorded if isinstance(recorded, dict) else {}

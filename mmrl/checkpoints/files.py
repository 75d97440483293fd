"""Folders that are written atomically, each with a manifest of sizes and checksums that reveals damage."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
PENDING = ".pending"  # suffix of a folder that is still being written
REPLACED = ".replaced"  # suffix of the previous folder until the new one has its name
DAMAGED = ".damaged"  # suffix of a checkpoint that a resumed run has skipped
STEP = re.compile(r"step-\d+")
OWN_NAMES = re.compile(r"step-\d+|best|final")  # names of folders that a run writes

Record = dict[str, Any]  # a file: its size in "bytes", and its "sha256"


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def list_finished(folder: Path) -> list[Path]:
    """Returns the checkpoints in `folder` that were written completely, oldest first. Does not verify them."""
    if not folder.is_dir():
        return []
    return sorted((p for p in folder.iterdir() if p.is_dir() and STEP.fullmatch(p.name)), key=step_of)


def records(folder: Path, files: list[Path]) -> dict[str, Record]:
    """Returns size and checksum of each of the `files`, by its path relative to `folder`."""
    return {file.relative_to(folder).as_posix(): _record(file) for file in files}


def write_manifest(folder: Path, file_records: dict[str, Record]) -> None:
    """Writes the manifest of `folder`, with a record of every file. file_records: the records that ranks made while
    they wrote; files that they lack are read here."""
    missing = [p for p in folder.rglob("*") if p.is_file() and p.relative_to(folder).as_posix() not in file_records]
    (folder / MANIFEST).write_text(_rendered({**file_records, **records(folder, missing)}))


def manifest(folder: Path) -> dict[str, Record]:
    """Returns the records in the manifest of `folder`. Raises ValueError if it is missing or damaged."""
    try:
        text = (folder / MANIFEST).read_text()
        file_records = json.loads(text)["files"]
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(f"{MANIFEST} cannot be read") from None
    if not isinstance(file_records, dict) or text != _rendered(file_records):
        raise ValueError(f"{MANIFEST} is damaged")
    return file_records


def find_damage_quickly(folder: Path, name: str) -> str | None:
    """Checks the sizes of a folder's files, and the checksum of the file `name`. Returns what is wrong, or None."""
    try:
        file_records = manifest(folder)
    except ValueError as error:
        return str(error)
    return _size_damage(folder, file_records) or _checksum_damage(folder, file_records, [name])


def find_damage(folder: Path, part: int = 0, parts: int = 1) -> str | None:
    """Checks the sizes and checksums of a folder's files. Returns what is wrong, or None. Several ranks can divide the
    reading: with `parts` of them, the one that passes `part` (from 0) reads every parts-th file."""
    try:
        file_records = manifest(folder)
    except ValueError as error:
        return str(error)
    return _size_damage(folder, file_records) or _checksum_damage(folder, file_records, list(file_records)[part::parts])


def commit(pending: Path, target: Path) -> None:
    """Flushes the folder `pending` to the disk and renames it to `target`, replacing a folder of that name. After a
    crash `target` is complete or absent (see `restore`). Files get the modes of the user's umask."""
    mask = os.umask(0)  # the umask can be read only by setting another one
    os.umask(mask)
    for path in [*pending.rglob("*"), pending]:
        path.chmod((0o777 if path.is_dir() else 0o666) & ~mask)  # safetensors writes its files for the owner alone
        sync(path)
    replaced = target.with_name(target.name + REPLACED)
    shutil.rmtree(replaced, ignore_errors=True)
    if target.exists():
        target.rename(replaced)
    pending.rename(target)
    sync(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def restore(folder: Path) -> None:
    """Cleans up after a run that was killed while it wrote checkpoints or weights: removes incomplete folders, and
    restores replaced ones whose successor is missing."""
    if not folder.is_dir():
        return
    for path in [p for p in folder.iterdir() if OWN_NAMES.fullmatch(p.stem)]:
        if path.suffix == PENDING or (path.suffix == REPLACED and path.with_suffix("").exists()):
            shutil.rmtree(path)
        elif path.suffix == REPLACED:
            path.rename(path.with_suffix(""))


def _record(file: Path) -> Record:
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return {"bytes": stream.tell(), "sha256": digest}


def _size_damage(folder: Path, file_records: dict[str, Record]) -> str | None:
    """Returns which recorded file is missing or has another size, or None."""
    for name, record in file_records.items():
        if not (folder / name).is_file():
            return f"{name} is missing"
        if (size := (folder / name).stat().st_size) != record["bytes"]:
            return f"{name} has {size} bytes instead of {record['bytes']}"
    return None


def _checksum_damage(folder: Path, file_records: dict[str, Record], names: list[str]) -> str | None:
    """Returns which of the named files has another checksum than recorded, or None."""
    for name in names:
        try:
            if name not in file_records or _record(folder / name) != file_records[name]:
                return f"{name} has another checksum than when it was written"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    return None


def _rendered(file_records: dict[str, Record]) -> str:
    """Returns the text of a manifest, which holds a checksum of its own records."""
    files = json.dumps(file_records, sort_keys=True, indent=1)
    return json.dumps(
        {"files": file_records, "sha256": hashlib.sha256(files.encode()).hexdigest()}, sort_keys=True, indent=1
    )


def sync(path: Path) -> None:
    """Flushes a file or folder to the disk (fsync)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

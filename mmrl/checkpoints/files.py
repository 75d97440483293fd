"""Folders that are whole or absent, and a manifest in each by which damage is noticed."""

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
REPLACED = ".replaced"  # suffix of what stood at a name until the new one took it
DAMAGED = ".damaged"  # suffix of a checkpoint that a resumed run had to pass over
STEP = re.compile(r"step-\d+")
OURS = re.compile(r"step-\d+|best|final")

Record = dict[str, Any]  # of a file: its size in bytes, and its sha256


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def finished(folder: Path) -> list[Path]:
    """Checkpoints in `folder` that were written to their end, oldest first; nothing is said of what became of them."""
    if not folder.is_dir():
        return []
    return sorted((p for p in folder.iterdir() if p.is_dir() and STEP.fullmatch(p.name)), key=step_of)


def records(folder: Path, files: list[Path]) -> dict[str, Record]:
    """Size and checksum of each of the `files` below `folder`, by its path there."""
    return {file.relative_to(folder).as_posix(): _record(file) for file in files}


def write_manifest(folder: Path, found: dict[str, Record]) -> None:
    """`found` is what other ranks recorded; the files that it lacks are read here."""
    rest = [p for p in folder.rglob("*") if p.is_file() and p.relative_to(folder).as_posix() not in found]
    (folder / MANIFEST).write_text(_rendered({**found, **records(folder, rest)}))


def manifest(folder: Path) -> dict[str, Record]:
    """Raises ValueError if it is missing or damaged."""
    try:
        text = (folder / MANIFEST).read_text()
        found = json.loads(text)["files"]
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(f"{MANIFEST} can not be read") from None
    if not isinstance(found, dict) or text != _rendered(found):
        raise ValueError(f"{MANIFEST} is damaged")
    return found


def quick_damage(folder: Path, name: str) -> str | None:
    """What is wrong with the files of a folder as far as their sizes tell, and the checksum of one of them, a small one
    that is to be read; or None."""
    try:
        found = manifest(folder)
    except ValueError as error:
        return str(error)
    return _size_damage(folder, found) or _checksum_damage(folder, found, [name])


def damage(folder: Path, part: int = 0, parts: int = 1) -> str | None:
    """What is wrong with the files of a folder by sizes and checksums, or None. Each file is read, or of them the share
    that number `part` of `parts` gets."""
    try:
        found = manifest(folder)
    except ValueError as error:
        return str(error)
    return _size_damage(folder, found) or _checksum_damage(folder, found, list(found)[part::parts])


def commit(pending: Path, target: Path) -> None:
    """Make every byte durable, then rename: after a crash the folder is whole or absent. One that is replaced is moved
    aside until then. Files get the modes that the user's umask gives."""
    mask = os.umask(0)
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
    """Clear up among checkpoints and weights in `folder` after a run that was killed while it wrote or renamed them."""
    if not folder.is_dir():
        return
    for path in [p for p in folder.iterdir() if OURS.fullmatch(p.stem)]:
        if path.suffix == PENDING or (path.suffix == REPLACED and path.with_suffix("").exists()):
            shutil.rmtree(path)
        elif path.suffix == REPLACED:
            path.rename(path.with_suffix(""))


def _record(file: Path) -> Record:
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return {"bytes": stream.tell(), "sha256": digest}


def _size_damage(folder: Path, found: dict[str, Record]) -> str | None:
    for name, record in found.items():
        if not (folder / name).is_file():
            return f"{name} is missing"
        if (size := (folder / name).stat().st_size) != record["bytes"]:
            return f"{name} has {size} bytes instead of {record['bytes']}"
    return None


def _checksum_damage(folder: Path, found: dict[str, Record], names: list[str]) -> str | None:
    for name in names:
        try:
            if name not in found or _record(folder / name) != found[name]:
                return f"{name} has another checksum than when it was written"
        except OSError as error:
            return f"{name} can not be read ({error.strerror})"
    return None


def _rendered(found: dict[str, Record]) -> str:
    """The text of a manifest, which holds a checksum of itself."""
    files = json.dumps(found, sort_keys=True, indent=1)
    return json.dumps({"files": found, "sha256": hashlib.sha256(files.encode()).hexdigest()}, sort_keys=True, indent=1)


def sync(path: Path) -> None:
    """Wait until the disk holds a file or folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

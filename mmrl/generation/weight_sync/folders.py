"""Folders through which weights are transferred to engines in other processes. Each run has one of its own."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from safetensors.torch import save_file
from torch import Tensor

from mmrl.runtime.files import use_default_permissions

GIB = 2**30
SHARD = 2 * GIB  # bytes of a file of weights; they are in memory until it is written
OWNER = "owner"  # a file that a running trainer keeps locked


class Exchange:
    """The folder of one run, which exists from the first `claim` to `clear`. A killed trainer leaves its folder behind;
    the next run with the same `parent` removes it, see `remove_abandoned`."""

    def __init__(self, parent: Path, run: str) -> None:
        self.path = parent / f"run-{run}"
        self._owner: IO[str] | None = None

    def claim(self) -> None:
        """Creates the folder, and locks it until this process ends. Does nothing at later calls."""
        if self._owner is None:
            self.path.mkdir(parents=True)
            self._owner = (self.path / OWNER).open("w")
            fcntl.flock(self._owner, fcntl.LOCK_EX)  # the kernel releases it when this process ends, also after a crash

    def clear(self) -> None:
        """Removes the folder and its lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._owner is not None:
            self._owner.close()
            self._owner = None


def remove_abandoned(parent: Path) -> list[Path]:
    """Removes the folders of ended runs in `parent`, and returns their paths."""
    folders = [owner.parent for owner in sorted(parent.glob(f"run-*/{OWNER}")) if _abandoned(owner)]
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    return folders


def _abandoned(owner: Path) -> bool:
    """Returns whether no process holds the lock; False on a file system without locks."""
    try:
        with owner.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except OSError:
        return False


def write_weights(folder: Path, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Writes weights as safetensors files. At most SHARD bytes and one further tensor are in memory at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    shard: dict[str, Tensor] = {}
    size = files = 0
    for name, value in weights:
        shard[name] = value.detach().cpu().contiguous()
        size += shard[name].nbytes
        if size >= SHARD:
            _write(shard, folder, files)
            shard, size, files = {}, 0, files + 1
    if shard:
        _write(shard, folder, files)
    use_default_permissions(folder)  # a server may run as another user


def _write(shard: dict[str, Tensor], folder: Path, number: int) -> None:
    save_file(shard, folder / f"model-{number:05d}.safetensors", metadata={"format": "pt"})

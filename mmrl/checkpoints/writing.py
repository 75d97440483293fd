"""Writes a rank's files of a checkpoint, either at once or in a thread during the next steps."""

from __future__ import annotations

import copy
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from mmrl.checkpoints import files


class Writing:
    """Writes files below `folder` and records their sizes and checksums.

    In the background a call copies its state into the host's memory and returns; a thread writes the copy, so the
    weights may change meanwhile. A failed write raises nothing, since other ranks wait for this one: see `problem`.
    """

    def __init__(self, folder: Path, *, background: bool) -> None:
        """folder: the folder of the checkpoint, to which names in `records` are relative. background: whether a thread
        writes."""
        self.folder = folder
        self.records: dict[str, files.Record] = {}
        self.problem: str | None = None
        self._thread = ThreadPoolExecutor(1, "checkpoint") if background else None
        self._jobs: list[Future[None]] = []

    def __call__(self, state: object, path: Path) -> None:
        """Writes `state` (whatever torch.save takes) to `path`."""
        if self._thread is None:
            self._write(state, path)
        else:
            self._jobs.append(self._thread.submit(self._write, copied(state, {}), path))

    @property
    def background(self) -> bool:
        return self._thread is not None

    @property
    def done(self) -> bool:
        return all(job.done() for job in self._jobs)

    def wait(self) -> None:
        """Waits until all files are written, or one has failed."""
        for job in self._jobs:
            job.result()
        if self._thread is not None:
            self._thread.shutdown()

    def _write(self, state: object, path: Path) -> None:
        """Writes a file and records its checksum. Stores an error in `problem`, after which nothing more is written."""
        if self.problem is not None:
            return
        try:
            torch.save(state, path)
            files.sync(path)  # in this thread: training waits while the folder is renamed
            self.records |= files.records(self.folder, [path])
        except (OSError, RuntimeError) as error:  # torch reports a failed write as RuntimeError
            self.problem = one_line(error)


def copied(state: Any, storages: dict[int, UntypedStorage]) -> Any:
    """Returns a copy of `state` on the CPU that shares no memory with it. Tensors that share a storage with one another
    share one in the copy too, so that its file is not larger. storages: the copies made so far, by the address of the
    original."""
    if isinstance(state, Tensor):
        storage = state.untyped_storage()
        if storage._cdata not in storages:
            storages[storage._cdata] = storage.clone() if storage.device.type == "cpu" else storage.cpu()
        tensor = torch.empty(0, dtype=state.dtype)
        return tensor.set_(storages[storage._cdata], state.storage_offset(), state.shape, state.stride())
    if isinstance(state, dict):
        duplicate = copy.copy(state)
        duplicate.update({key: copied(value, storages) for key, value in state.items()})
        return duplicate
    if type(state) in (list, tuple):
        return type(state)(copied(value, storages) for value in state)
    return copy.copy(state)


def one_line(error: Exception) -> str:
    """Returns the message of an exception as one line of at most 200 characters."""
    return " ".join(str(error).split())[:200]

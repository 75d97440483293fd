"""Saves the checkpoints of a run while it trains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from mmrl.checkpoints import store
from mmrl.checkpoints.settings import Checkpoint
from mmrl.checkpoints.store import Pending
from mmrl.engine import Engine
from mmrl.runtime.devices import local_ranks


class Saver:
    """Saves checkpoints, at most one at a time. All methods are collectives.

    Leaving the context finishes the checkpoint that is being written. After an exception it does so only without other
    ranks: they may be in the middle of a step, and this one would wait for them.
    """

    def __init__(self, folder: Path, settings: Checkpoint, engine: Engine, say: Callable[[str], None]) -> None:
        self.folder, self.settings, self.engine, self.say = folder, settings, engine, say
        self._pending: Pending | None = None

    def save(self, step: int, state: dict[str, Any], rank_state: dict[str, Any]) -> None:
        """Begins a checkpoint, and finishes it unless it is written in the background. Arguments: see `store.begin`.
        Raises UserError if weights are NaN or infinite, or if a checkpoint could not be written."""
        self.finish()
        self._pending = store.begin(self.folder, step, state, rank_state, self.engine, background=self._in_background())
        if not self._pending.writing.background:
            self.finish()

    def poll(self) -> None:
        """Finishes the pending checkpoint if all ranks have written it."""
        if self._pending is not None and self.engine.max(not self._pending.writing.done) == 0:
            self.finish()

    def finish(self) -> None:
        """Waits for the checkpoint that is being written, if there is one, and renames it."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.writing.wait()
            store.end(pending, self.engine, keep=self.settings.keep)
            self.say(f"saved {pending.target}")

    def _in_background(self) -> bool:
        """Returns whether to write in the background: as `background` says; if it is "auto", whether all ranks have
        memory for two copies of what they save."""
        wanted = self.settings.background
        if wanted != "auto":
            return wanted
        free = psutil.virtual_memory().available / local_ranks()
        return self.engine.max(2 * self.engine.saved_bytes > free) == 0  # no rank lacks memory

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Finishes the checkpoint that is being written; after an exception only if there are no other ranks."""
        if kind is None or self.engine.world == 1:
            self.finish()

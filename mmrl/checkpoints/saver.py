"""Checkpoints of a run as it trains, one after another."""

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
    """Saves when it is told to, at most one checkpoint at a time. What it does is collective.

    As a context it finishes the checkpoint that is being written. After an exception only a lone rank does: others may
    be in the middle of a step, and would be waited for.
    """

    def __init__(self, folder: Path, settings: Checkpoint, engine: Engine, say: Callable[[str], None]) -> None:
        self.folder, self.settings, self.engine, self.say = folder, settings, engine, say
        self._pending: Pending | None = None

    def save(self, step: int, state: dict[str, Any], own: dict[str, Any]) -> None:
        """Begin to write a checkpoint, and finish it unless it is written in the background. Raises as `store.begin`
        and `store.finish`; see there for the arguments."""
        self.finish()
        self._pending = store.begin(self.folder, step, state, own, self.engine, background=self._in_background())
        if not self._pending.writing.background:
            self.finish()

    def look(self) -> None:
        """Finish a checkpoint that all ranks have written by now."""
        if self._pending is not None and self.engine.max(not self._pending.writing.done) == 0:
            self.finish()

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, if there is one, and give it its name."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.writing.wait()
            store.end(pending, self.engine, keep=self.settings.keep)
            self.say(f"saved {pending.target}")

    def _in_background(self) -> bool:
        wanted = self.settings.background
        if wanted != "auto":
            return wanted
        free = psutil.virtual_memory().available / local_ranks()
        return self.engine.max(2 * self.engine.saved_bytes > free) == 0

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None or self.engine.world == 1:
            self.finish()

"""Warnings of calls that take long and that this process cannot end."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)


class CallWatch:
    """Watches the calls of one simulator, thousands a minute, in a single thread, which ends where there is no call to
    watch."""

    def __init__(self, name: str, limit_s: float | None) -> None:
        """limit_s: seconds that a call may take before a warning; None: no warnings."""
        self.name, self.limit_s = name, limit_s
        self._calls: dict[object, tuple[str, float]] = {}  # calls without a warning yet: name, and time of the warning
        self._lock = threading.Lock()
        self._watching = False  # whether the thread runs
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    @contextmanager
    def over(self, what: str) -> Iterator[None]:
        """Logs a warning if the enclosed call takes too long."""
        if self.limit_s is None:
            yield
            return
        call = object()
        with self._lock:
            self._calls[call] = what, time.monotonic() + self.limit_s
            begins, self._watching = not self._watching, True
        if begins:
            self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)
            self._thread.start()
        try:
            yield
        finally:
            with self._lock:
                self._calls.pop(call, None)

    def close(self) -> None:
        """Ends the thread, which would sleep until the last call's time is up."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        while (wait := self._report_late()) is not None:
            self._closed.wait(wait)  # a call that begins meanwhile has more time than these

    def _report_late(self) -> float | None:
        """Warns of calls that take too long. Returns seconds until the next one will, None where there is none."""
        now = time.monotonic()
        with self._lock:
            for call, (what, end) in list(self._calls.items()):
                if end <= now:
                    del self._calls[call]
                    self._warn(what)
            self._watching = bool(self._calls) and not self._closed.is_set()
            return min(end for _, end in self._calls.values()) - now if self._watching else None

    def _warn(self, what: str) -> None:
        log.warning(
            "simulator %s: a %s takes longer than %g s; it runs in the trainer's process, where nothing can end it: "
            "with task.workers=1 or more it would be replaced by now",
            self.name,
            what,
            self.limit_s,
        )

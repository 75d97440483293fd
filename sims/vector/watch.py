"""Says when a call takes very long that nothing in this process can end."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

log = logging.getLogger(__name__)


@dataclass(eq=False)
class WatchedCall:
    what: str
    deadline: float  # of `time.monotonic`
    told: bool = False


class CallWatch:
    """Over the calls of one simulator, thousands a minute: a single thread looks after all of them, and ends when it
    finds nothing to look after."""

    def __init__(self, name: str, limit_s: float | None) -> None:
        """limit_s: seconds that a call may take before a warning; None: nobody wants to know."""
        self.name, self.limit_s = name, limit_s
        self._calls: set[WatchedCall] = set()
        self._books = threading.Lock()
        self._looks = False  # whether the thread runs
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    @contextmanager
    def over(self, what: str) -> Iterator[None]:
        """Logs a warning if what it encloses takes too long."""
        if self.limit_s is None:
            yield
            return
        call = WatchedCall(what, time.monotonic() + self.limit_s)
        with self._books:
            self._calls.add(call)
            begins, self._looks = not self._looks, True
        if begins:
            self._thread = threading.Thread(target=self._look, name="watch", daemon=True)
            self._thread.start()
        try:
            yield
        finally:
            with self._books:
                self._calls.discard(call)

    def close(self) -> None:
        """Ends the thread, which would sleep until the last call's time is up."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _look(self) -> None:
        while True:
            now = time.monotonic()
            with self._books:
                open_calls = [call for call in self._calls if not call.told]
                if not open_calls or self._closed.is_set():
                    self._looks = False
                    return
                late = [call for call in open_calls if call.deadline <= now]
            for call in late:
                call.told = True
                self._tell(call.what)
            if not late:  # a call that begins meanwhile has more time than these
                self._closed.wait(min(call.deadline for call in open_calls) - now)

    def _tell(self, what: str) -> None:
        log.warning(
            "simulator %s: a %s takes longer than %g s; it runs in the trainer's process, where nothing can end it: "
            "with task.workers=1 or more it would be replaced by now",
            self.name,
            what,
            self.limit_s,
        )

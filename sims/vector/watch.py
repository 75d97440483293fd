"""Says when a call takes very long that nothing in this process can end."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)


class CallWatch:
    """Over the calls of one simulator, thousands a minute: a single thread looks after all of them, and ends when it
    finds nothing to look after."""

    def __init__(self, name: str, limit_s: float | None) -> None:
        """limit_s: seconds that a call may take before a warning; None: nobody wants to know."""
        self.name, self.limit_s = name, limit_s
        self._calls: dict[object, tuple[str, float]] = {}  # not told of: what, and when that shall be
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
        call = object()
        with self._books:
            self._calls[call] = what, time.monotonic() + self.limit_s
            begins, self._looks = not self._looks, True
        if begins:
            self._thread = threading.Thread(target=self._look, name="watch", daemon=True)
            self._thread.start()
        try:
            yield
        finally:
            with self._books:
                self._calls.pop(call, None)

    def close(self) -> None:
        """Ends the thread, which would sleep until the last call's time is up."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _look(self) -> None:
        while (wait := self._late()) is not None:
            self._closed.wait(wait)  # a call that begins meanwhile has more time than these

    def _late(self) -> float | None:
        """Tells of calls that take too long. Seconds until the next one will; None where there is none."""
        now = time.monotonic()
        with self._books:
            for call, (what, end) in list(self._calls.items()):
                if end <= now:
                    del self._calls[call]
                    self._tell(what)
            self._looks = bool(self._calls) and not self._closed.is_set()
            return min(end for _, end in self._calls.values()) - now if self._looks else None

    def _tell(self, what: str) -> None:
        log.warning(
            "simulator %s: a %s takes longer than %g s; it runs in the trainer's process, where nothing can end it: "
            "with task.workers=1 or more it would be replaced by now",
            self.name,
            what,
            self.limit_s,
        )

"""Warnings of calls that take too long and cannot be interrupted, and an end of those that take for ever."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from mmrl.runtime.user_code import END_AFTER
from mmrl.runtime.watchdog import ends_process

log = logging.getLogger(__name__)


class CallWatch:
    """Warns if a call of a simulator takes longer than `limit_s` seconds (None: never). If it takes END_AFTER times as
    long, ends this process with one line on stderr.

    One thread watches all calls, and ends while there are none: there may be thousands of calls a minute.
    """

    def __init__(self, name: str, limit_s: float | None) -> None:
        self.name, self.limit_s = name, limit_s
        self._calls: dict[object, tuple[str, float]] = {}  # by call without a warning yet: its name, and when to warn
        self._lock = threading.Lock()
        self._watching = False  # whether the thread runs
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    @contextmanager
    def over(self, call_name: str) -> Iterator[None]:
        """Logs a warning if the enclosed call takes too long, and ends this process if it takes for ever."""
        if self.limit_s is None:
            yield
            return
        call = object()
        with self._lock:
            self._calls[call] = call_name, time.monotonic() + self.limit_s
            starts_thread, self._watching = not self._watching, True
        if starts_thread:
            self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)
            self._thread.start()
        limit = END_AFTER * self.limit_s
        message = (
            f"mmrl: simulator {self.name}: a {call_name} takes longer than {limit:g} s, {END_AFTER} times "
            "task.deadline_s; set task.workers to 1 or more, so that a worker that hangs is replaced; the run ends"
        )
        try:
            with ends_process(limit, message):
                yield
        finally:
            with self._lock:
                self._calls.pop(call, None)

    def close(self) -> None:
        """Ends the thread at once, also if it is waiting."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        """Waits for calls to become due, until there are none."""
        while (wait := self._warn_of_overdue()) is not None:
            self._closed.wait(wait)  # a call that begins meanwhile is due later than these

    def _warn_of_overdue(self) -> float | None:
        """Warns of calls that take too long. Returns the seconds until the next call is due, None if there is none."""
        now = time.monotonic()
        with self._lock:
            for call, (call_name, end) in list(self._calls.items()):
                if end <= now:
                    del self._calls[call]
                    self._warn(call_name)
            self._watching = bool(self._calls) and not self._closed.is_set()
            return min(end for _, end in self._calls.values()) - now if self._watching else None

    def _warn(self, call_name: str) -> None:
        """Logs that a call takes longer than the limit. call_name: "reset" or "step"."""
        log.warning(
            "simulator %s: a %s takes longer than %g s and cannot be interrupted, since it runs in the trainer's "
            "process; set task.workers to 1 or more, so that a worker that hangs is replaced",
            self.name,
            call_name,
            self.limit_s,
        )

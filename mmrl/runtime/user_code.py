"""Guards of the process in which a user's code runs: os._exit, which would make an incomplete run look complete, is
refused; torch's default dtype and Python's recursion limit are set back; constructors that hang end the process."""

from __future__ import annotations

import logging
import os
import posix
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from mmrl.runtime.watchdog import ends_process

log = logging.getLogger(__name__)

end_at_once = os._exit  # the original, for mmrl's own use

END_AFTER = 10  # times the limit after which a call ends the process

_refusing = [0]  # id of the process in which `_exit` raises; 0: none
_WARNED: set[tuple[str, str]] = set()  # (name, setting) of warnings of `settings_restored` that were logged


@contextmanager
def exits_refused() -> Iterator[None]:
    """A context in which os._exit and posix._exit raise SystemExit in this process. In a process that it forks they
    exit. Code that imports one of them in the block, as in `from os import _exit`, keeps what does so."""
    before, originals = _refusing[0], (os._exit, posix._exit)
    _refusing[0] = os.getpid()
    os._exit = posix._exit = _exit
    try:
        yield
    finally:
        _refusing[0] = before
        os._exit, posix._exit = originals


def _exit(status: int) -> NoReturn:
    """Replaces os._exit."""
    if os.getpid() == _refusing[0]:
        caller = sys._getframe(1)
        location = f"{Path(caller.f_code.co_filename).name}:{caller.f_lineno}"
        raise SystemExit(f"os._exit({status}) was called in the training process by {location}")
    end_at_once(status)


@contextmanager
def settings_restored(name: str) -> Iterator[None]:
    """A context after which torch's default dtype and Python's recursion limit are as before. Logs a warning where the
    block changed one, the first time for each `name`, which says whose code it is.

    torch is not imported, since simulators in processes of their own may do without it.
    """
    torch: Any = sys.modules.get("torch")
    dtype, limit = None if torch is None else torch.get_default_dtype(), sys.getrecursionlimit()
    try:
        yield
    finally:
        if dtype is not None and (changed := torch.get_default_dtype()) != dtype:
            torch.set_default_dtype(dtype)
            _warn(name, "torch's default dtype", changed, dtype)
        if (number := sys.getrecursionlimit()) != limit:
            sys.setrecursionlimit(limit)
            _warn(name, "Python's recursion limit", number, limit)


@contextmanager
def construction_watched(name: str, limit_s: float, limit_name: str, remedy: str) -> Iterator[None]:
    """A context in which an object of a user's class is constructed. If that takes longer than `limit_s` seconds, logs
    a warning; if it takes END_AFTER times as long, ends this process with one line on stderr.

    name: what is constructed, with its key; limit_name: what the limit is called in messages; remedy: what to do.
    """
    begun = f"{name} is still being constructed after"
    times = f"{END_AFTER} times {limit_name}"
    warning = threading.Timer(
        limit_s,
        lambda: log.warning("%s %g s; the run ends after %g s, %s", begun, limit_s, END_AFTER * limit_s, times),
    )
    warning.daemon = True
    warning.start()
    message = f"mmrl: {begun} {END_AFTER * limit_s:g} s, {times}; {remedy}; the run ends"
    try:
        with ends_process(END_AFTER * limit_s, message):
            yield
    finally:
        warning.cancel()


def _warn(name: str, setting: str, value: object, before: object) -> None:
    """Logs that user code changed a setting, once for each name and setting."""
    if (name, setting) not in _WARNED:
        _WARNED.add((name, setting))
        log.warning(
            "%s set %s to %s for the whole process; it is set back to %s after each call", name, setting, value, before
        )

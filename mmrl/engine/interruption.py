"""Handling of Ctrl-C, SIGTERM and SIGUSR1 (which schedulers send before a time limit): they request an orderly end."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
from functools import cache
from types import FrameType, TracebackType
from typing import Any

from mmrl.runtime.user_code import exits_refused

SCHEDULER = (signal.SIGTERM, signal.SIGUSR1)
ENDED_IN_C = signal.SIGRTMIN + 11 if sys.platform == "linux" else None  # raised by C's exit() during a training


class Interruption:
    """A context in which SIGTERM, SIGUSR1 and SIGINT (Ctrl-C) only set `signum` to their number, for a loop that reads
    it between two steps. A second SIGINT ends the process at once. SIGTERM and SIGUSR1 stay caught after the block if
    one of them came, since a scheduler may send them again while the process ends.

    In the block os._exit raises SystemExit, see `exits_refused`. On Linux, exit() in a C library prints the stack to
    stderr and ends the process by the signal `ENDED_IN_C`.
    """

    def __init__(self) -> None:
        self.signum = 0
        self._previous: dict[int, Any] = {}  # handlers by signal number
        self._exits = exits_refused()

    def __enter__(self) -> Interruption:
        """Replaces the handlers of the signals, os._exit, and on Linux what exit() in a C library does."""
        self._previous = {number: signal.signal(number, self._record) for number in (*SCHEDULER, signal.SIGINT)}
        self._exits = exits_refused()
        self._exits.__enter__()
        if ENDED_IN_C is not None:
            _raise_at_exit(ENDED_IN_C)
            signal.signal(ENDED_IN_C, signal.SIG_DFL)
            faulthandler.register(ENDED_IN_C, file=2, all_threads=False, chain=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Restores os._exit and the handlers, but the handlers of SIGTERM and SIGUSR1 only if neither signal came."""
        self._exits.__exit__(kind, error, traceback)
        if ENDED_IN_C is not None:
            faulthandler.unregister(ENDED_IN_C)
            signal.signal(ENDED_IN_C, signal.SIG_IGN)  # exit() still raises it; from here on that has no effect
        for number, handler in self._previous.items():
            if number == signal.SIGINT or self.signum not in SCHEDULER:
                signal.signal(number, handler)

    def _record(self, signum: int, frame: FrameType | None) -> None:
        """Handles a signal: stores its number, and makes the next Ctrl-C end the process at once."""
        self.signum = signum
        if signum == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # unlike a Python handler it works during a collective
            if os.environ.get("RANK", "0") == "0":
                print("Ctrl-C: the run ends after this step and saves; once more ends it at once", flush=True)


@cache
def _raise_at_exit(signum: int) -> None:
    """Registers an exit handler in C that raises a signal. A Python handler could not run at that time, since the
    interpreter may have been finalized."""
    library = ctypes.CDLL(None)
    register = library["__cxa_atexit"]
    register.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    if register(ctypes.cast(library["raise"], ctypes.c_void_p), signum, None):
        raise OSError("C's exit accepts no more handlers")

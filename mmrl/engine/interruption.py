"""Ctrl-C, SIGTERM and SIGUSR1 (which schedulers send before a time limit), as a wish to end in order."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
from functools import cache
from types import FrameType, TracebackType
from typing import Any, NoReturn

SCHEDULER = (signal.SIGTERM, signal.SIGUSR1)
ENDED_IN_C = signal.SIGRTMIN + 11 if sys.platform == "linux" else None  # what C's exit raises during a training


class Interruption:
    """Context in which SIGTERM, SIGUSR1 and SIGINT (Ctrl-C) only leave their number in `signum`, for a loop that reads
    it between two steps; a second SIGINT ends the process at once. After SIGTERM or SIGUSR1 the process ends: they stay
    caught, for a scheduler may send them again, which must not change how it ends.

    os._exit raises SystemExit in this process: user code that calls it would make half a run look like a whole one.
    On Linux exit() of a C library ends it by the signal `ENDED_IN_C`, after the stack of who called is on stderr.
    """

    def __init__(self) -> None:
        self.signum = 0
        self._before: dict[int, Any] = {}
        self._process, self._exit = os.getpid(), os._exit

    def __enter__(self) -> Interruption:
        self._before = {number: signal.signal(number, self._note) for number in (*SCHEDULER, signal.SIGINT)}
        self._process, self._exit = os.getpid(), os._exit
        os._exit = self._refuse
        if ENDED_IN_C is not None:
            _raise_at_exit(ENDED_IN_C)
            signal.signal(ENDED_IN_C, signal.SIG_DFL)
            faulthandler.register(ENDED_IN_C, file=2, all_threads=False, chain=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os._exit = self._exit
        if ENDED_IN_C is not None:
            faulthandler.unregister(ENDED_IN_C)
            signal.signal(ENDED_IN_C, signal.SIG_IGN)  # the handler of exit stays: from here on exit is as ever
        for number, handler in self._before.items():
            if number == signal.SIGINT or self.signum not in SCHEDULER:
                signal.signal(number, handler)

    def _refuse(self, status: int) -> NoReturn:
        if os.getpid() != self._process:  # a process that user code has forked
            self._exit(status)
        raise SystemExit(f"os._exit({status}) in the process of the training, which goes on or ends by name")

    def _note(self, signum: int, frame: FrameType | None) -> None:
        """Handles a signal: records it; a second Ctrl-C ends the process at once."""
        self.signum = signum
        if signum == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # the system's own: it works while a collective waits, too
            if os.environ.get("RANK", "0") == "0":
                print("Ctrl-C: the run ends after this step and saves; once more ends it at once", flush=True)


@cache
def _raise_at_exit(signum: int) -> None:
    """Has C's exit raise a signal, in C alone: at the usual exit no interpreter is left that could run a function."""
    library = ctypes.CDLL(None)
    register = library["__cxa_atexit"]
    register.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    if register(ctypes.cast(library["raise"], ctypes.c_void_p), signum, None):
        raise OSError("C's exit accepts no more handlers")

"""os._exit during a run: user code that calls it would make an incomplete run look complete."""

from __future__ import annotations

import os
import posix
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

end_at_once = os._exit  # the original, for mmrl's own use

_refusing = [0]  # id of the process in which `_exit` raises; 0: none


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

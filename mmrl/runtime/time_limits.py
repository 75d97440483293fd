"""Time limits for Python code from untrusted files, such as a chat template."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from mmrl.errors import UserError


class OutOfTime(BaseException):
    """Raised in a block that took too long. It is not an Exception, so that the block does not catch it."""


@contextmanager
def time_limit(seconds: float, message: str) -> Iterator[None]:
    """Raises UserError with the message where the block takes longer. It is stopped between two Python instructions: a
    single one that does not return, such as a call of a C library, is not stopped."""
    thread, lock, ended = threading.get_ident(), threading.Lock(), threading.Event()

    def stop() -> None:
        """Raises OutOfTime in the thread of the block, unless the block has ended."""
        with lock:
            if not ended.is_set():
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(OutOfTime))

    timer = threading.Timer(seconds, stop)
    timer.daemon = True
    timer.start()
    try:
        try:
            yield
        finally:
            with lock:
                ended.set()
            timer.cancel()
    except OutOfTime:
        raise UserError(message) from None

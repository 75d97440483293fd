"""A process that ends this one if a call of user code takes too long and no thread of this process can stop it. It
also reports an end of this process that Python does not notice.

A thread with a time limit can be abandoned only while other threads run. A call that holds Python's interpreter, such
as a regular expression that backtracks, stops all of them. The main thread cannot be abandoned at all. Such calls are
entered into a table in shared memory, which this file reads when it is run as a program.
"""

from __future__ import annotations

import atexit
import math
import mmap
import os
import select
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import count

SLOTS = 256  # calls that are watched at the same time
TEXT = 400  # bytes of a message
_NUMBER, _LIMIT = struct.Struct("=Q"), struct.Struct("=dH")  # of a call, 0: none; its limit and its message's length
SIZE = 8 + 16 + TEXT  # bytes of a slot
POLL_S = 0.5  # seconds between two looks at the table
RELEASED = b"."  # what a process writes that ends in order


class Watchdog:
    """The table of calls, and the process that reads it. It ends with this process."""

    def __init__(self) -> None:
        """Starts the process. Raises OSError where that is impossible."""
        self.owner = os.getpid()
        self._free, self._numbers = deque(range(SLOTS)), count(1)
        with tempfile.TemporaryFile() if sys.platform != "linux" else open(os.memfd_create("watchdog"), "r+b") as file:
            file.truncate(SLOTS * SIZE)
            self._table = mmap.mmap(file.fileno(), SLOTS * SIZE)
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, str(file.fileno()), str(self.owner)],
                stdin=subprocess.PIPE,  # closed by the end of this process
                stdout=subprocess.DEVNULL,
                pass_fds=[file.fileno()],
                start_new_session=True,  # Ctrl-C is for the trainer
            )

    @contextmanager
    def watch(self, limit_s: float, message: str) -> Iterator[None]:
        """Watches the block: if it takes longer than `limit_s` seconds, the message is printed to stderr and this
        process ends by SIGKILL. Time in which this process is stopped (SIGSTOP) does not count. While SLOTS blocks are
        watched, further ones are not."""
        try:
            slot = self._free.popleft()
        except IndexError:
            yield
            return
        text, offset = message.encode(errors="replace")[:TEXT], slot * SIZE
        self._table[offset + 24 : offset + 24 + len(text)] = text
        _LIMIT.pack_into(self._table, offset + 8, limit_s, len(text))
        _NUMBER.pack_into(self._table, offset, next(self._numbers))  # last: from here on the slot counts
        try:
            yield
        finally:
            _NUMBER.pack_into(self._table, offset, 0)
            self._free.append(slot)

    def close(self) -> None:
        """Ends the process."""
        if self.owner == os.getpid():  # and not a fork
            self.release()
            self._process.wait()

    def release(self) -> None:
        """Tells the process that this one is about to end, which it then does not report."""
        assert self._process.stdin is not None
        if self.owner == os.getpid() and not self._process.stdin.closed:
            with suppress(BrokenPipeError):
                os.write(self._process.stdin.fileno(), RELEASED)
            self._process.stdin.close()


_WATCHDOGS: list[Watchdog] = []  # of this process; of its parent after a fork


@contextmanager
def ends_process(limit_s: float, message: str) -> Iterator[None]:
    """A context that ends this process if its block takes longer than `limit_s` seconds, as `Watchdog.watch` does."""
    if not _WATCHDOGS or _WATCHDOGS[0].owner != os.getpid():
        _WATCHDOGS[:] = [Watchdog()]
        atexit.register(_WATCHDOGS[0].close)
    with _WATCHDOGS[0].watch(limit_s, message):
        yield


def reports_sudden_end(message: str) -> AbstractContextManager[None]:
    """Returns a context that has no time limit. If this process ends inside it without running its exit handlers (by
    SIGKILL, or by _exit of a C library, whose exit code may be 0), the message is printed to stderr."""
    return ends_process(math.inf, message)


def release() -> None:
    """Announces that this process ends at once on purpose, so that the end is not reported."""
    for watchdog in _WATCHDOGS:
        watchdog.release()


def overdue(table: mmap.mmap, elapsed: float, waited: dict[int, float]) -> str | None:
    """Returns the message of a call that takes too long, or None. elapsed: seconds since the last look. waited: the
    seconds that each call, by its number, has taken so far; updated here."""
    running = {}
    for offset in range(0, SLOTS * SIZE, SIZE):
        (number,) = _NUMBER.unpack_from(table, offset)
        if number:
            running[number] = offset
            waited[number] = waited.get(number, -elapsed) + elapsed  # 0 at the first look
    for number in waited.keys() - running.keys():
        del waited[number]
    for number, offset in running.items():
        limit, text = entry(table, offset)
        if waited[number] > limit and _NUMBER.unpack_from(table, offset) == (number,):
            return text
    return None


def entry(table: mmap.mmap, offset: int) -> tuple[float, str]:
    """Returns the time limit and the message of the call at `offset`."""
    limit, length = _LIMIT.unpack_from(table, offset + 8)
    return limit, table[offset + 24 : offset + 24 + length].decode(errors="replace")


def sudden_ends(table: mmap.mmap) -> list[str]:
    """Returns the messages for a process that has just ended suddenly: those of the blocks without a time limit that it
    was in."""
    running = [offset for offset in range(0, SLOTS * SIZE, SIZE) if _NUMBER.unpack_from(table, offset) != (0,)]
    return [text for limit, text in (entry(table, offset) for offset in running) if limit == math.inf]


def is_stopped(process: int) -> bool:
    """Returns whether a process is stopped, by SIGSTOP or a debugger. On systems without /proc: False."""
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except OSError:
        return False


def main(descriptor: int, process: int) -> None:
    """Watches `process`, this one's parent, until it ends. descriptor: file descriptor of the table."""
    table, waited, last = mmap.mmap(descriptor, SLOTS * SIZE), dict[int, float](), time.monotonic()
    while not select.select([0], [], [], POLL_S)[0] and os.getppid() == process:
        now = time.monotonic()
        elapsed, last = min(now - last, 2 * POLL_S), now  # more than that: this process was stopped itself
        text = overdue(table, 0.0 if is_stopped(process) else elapsed, waited)
        if text is not None:
            print(text, file=sys.stderr, flush=True)
            os.kill(process, signal.SIGKILL)
            return
    # A fork of that process may hold the other end of the pipe, so that a read would block.
    if not (select.select([0], [], [], 0)[0] and os.read(0, 1) == RELEASED):
        for text in sudden_ends(table):
            print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))

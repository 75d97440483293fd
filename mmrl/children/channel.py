"""Length-prefixed frames over a socket between two processes, with time limits for answers.

A frame is eight bytes with the length of the payload, then the payload. An empty frame is a sign of life (keep-alive),
which tells a slow process from a stopped one.
"""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable

LENGTH = 8  # bytes of the length at the beginning of a frame
SHORT = 1 << 16  # bytes; a shorter payload is sent in one call together with its length
POLL_S = 0.5  # seconds between two checks whether the other side still runs


class Patience:
    """The time limits of a wait for an answer. limit_s: seconds for the complete answer. silent_s: seconds without a
    byte of it or a sign of life. poll: called about every POLL_S seconds of silence; it raises if no answer will
    come."""

    def __init__(
        self, limit_s: float = math.inf, silent_s: float = math.inf, poll: Callable[[], None] | None = None
    ) -> None:
        """limit_s: seconds until the whole answer. silent_s: seconds until the next sign of life. poll: is called
        repeatedly in the meantime, and may raise."""
        self.limit_s, self.silent_s, self.poll = limit_s, silent_s, poll
        self._end = time.monotonic() + limit_s
        self.heard()

    def heard(self) -> None:
        """Restarts the time limit of silence; called after each byte and sign of life."""
        self._silent = time.monotonic() + self.silent_s

    def left(self) -> float | None:
        """Returns for how many seconds to wait for the next bytes; None: without limit. Raises TimeoutError if a time
        limit is exceeded."""
        now = time.monotonic()
        if now >= self._end:
            raise TimeoutError(f"no answer in {self.limit_s:g} s")
        if now >= self._silent:
            raise TimeoutError(f"no heartbeat in {self.silent_s:g} s")
        left = min(self._end - now, self._silent - now, math.inf if self.poll is None else POLL_S)
        return None if left == math.inf else left


class Channel:
    """One end of a connection, which sends and receives frames."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket, self._sending = connection, threading.Lock()

    def send(self, payload: bytes = b"", limit_s: float | None = None) -> None:
        """Sends a frame, by default a sign of life. Raises TimeoutError, and OSError if the other process has ended."""
        head = len(payload).to_bytes(LENGTH, "big")
        with self._sending:
            self.socket.settimeout(None if limit_s == math.inf else limit_s)
            # joined if short, which saves a packet
            for part in [head + payload] if len(payload) < SHORT else [head, payload]:
                self.socket.sendall(part)

    def receive(self, patience: Patience | None = None, max_bytes: float = math.inf) -> bytearray:
        """Returns the payload of the next frame that is not a sign of life. Raises TimeoutError, ConnectionError if the
        other process has ended, and ValueError for a frame of more than `max_bytes` bytes."""
        patience = patience or Patience()
        while not (size := int.from_bytes(self._receive_exactly(LENGTH, patience), "big")):
            pass  # an empty frame is a sign of life
        if size > max_bytes:
            raise ValueError(f"the answer has {size} bytes, more than the limit of {max_bytes:g}")
        return self._receive_exactly(size, patience)

    def ask(self, payload: bytes, patience: Patience, max_bytes: float = math.inf) -> bytearray:
        """Sends a request and returns the payload of the answer. Raises like `receive`."""
        self.send(payload, min(patience.limit_s, patience.silent_s))
        return self.receive(patience, max_bytes)

    def close(self) -> None:
        self.socket.close()

    def _receive_exactly(self, count: int, patience: Patience) -> bytearray:
        """Receives exactly `count` bytes. Raises TimeoutError by `patience`, and ConnectionResetError if the other
        process ends."""
        buffer = bytearray(count)
        view = memoryview(buffer)
        while view:
            self.socket.settimeout(patience.left())
            try:
                num_read = self.socket.recv_into(view)
            except TimeoutError:
                if patience.poll is not None:
                    patience.poll()
                continue
            if not num_read:
                raise ConnectionResetError("the other process closed the connection")
            view = view[num_read:]
            patience.heard()
        return buffer

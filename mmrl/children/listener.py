"""The endpoint to which a process that was started elsewhere connects, authenticated by a key."""

from __future__ import annotations

import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

from mmrl.children.channel import POLL_S, Channel

KEY = "MMRL_CHILD_KEY"  # environment variable that holds the key of a process; secret
GREETING_S = 20.0  # seconds for a caller to prove that it has the key
MOST_GREETINGS = 32  # callers at a time that have not proved it yet
RETRY_S = 0.1  # seconds until the next accept after an error


class Pair:
    """A connected pair of sockets, for a process on this host that inherits the other end."""

    def __init__(self) -> None:
        self.ours, self.theirs = socket.socketpair()

    def accept(self, poll: Callable[[], None], limit_s: float) -> Channel:
        """Returns the channel at once; the arguments are for a `Listener`."""
        return Channel(self.ours)

    def close(self) -> None:
        self.ours.close()


class Listener:
    """Listens on `host` for the process that has its key."""

    def __init__(self, host: str) -> None:
        """Listens in a thread, at a free port of this host's address `host`."""
        self.key = secrets.token_hex(32)
        self._listener = socket.create_server((host, 0))
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._callers: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        self._greetings, self._closed = threading.BoundedSemaphore(MOST_GREETINGS), False
        threading.Thread(target=self._listen, daemon=True).start()

    def accept(self, poll: Callable[[], None], limit_s: float) -> Channel:
        """Waits for the connection. poll: called meanwhile; it raises if none will come. Raises TimeoutError after
        `limit_s` seconds."""
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            with suppress(queue.Empty):
                return Channel(self._callers.get(timeout=POLL_S))
            poll()
        raise TimeoutError(f"no process connected within {limit_s:g} s")

    def close(self) -> None:
        """Stops listening, and ends the thread that does."""
        self._closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that listens
        self._listener.close()

    def _listen(self) -> None:
        """Accepts connections until the listener is closed; each is authenticated in a thread of its own."""
        while True:
            try:
                caller, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                # For example no free file descriptor: callers without the key free theirs after GREETING_S.
                time.sleep(RETRY_S)
                continue
            if not self._greetings.acquire(blocking=False):
                caller.close()
                continue
            # In a thread of its own, so that a silent caller does not block the others.
            threading.Thread(target=self._greet, args=(caller,), daemon=True).start()

    def _greet(self, caller: socket.socket) -> None:
        """Authenticates a caller, and closes its connection if it does not have the key."""
        try:
            _challenge(caller, self.key, deliver_challenge, answer_challenge)
        except (AuthenticationError, EOFError, OSError, ValueError):
            caller.close()
        else:
            self._callers.put(caller)
        finally:
            self._greetings.release()


def dial(host: str, port: int, key: str) -> Channel:
    """Connects to a `Listener`. Raises OSError, EOFError or AuthenticationError if it does not listen or has another
    key."""
    caller = socket.create_connection((host, port))
    _challenge(caller, key, answer_challenge, deliver_challenge)
    return Channel(caller)


def _challenge(caller: socket.socket, key: str, *steps: Callable[[Connection, bytes], None]) -> None:
    """Authenticates both processes by the key, which is not sent. steps: the two halves of the handshake, in this
    process's order. Raises AuthenticationError, EOFError or OSError if it fails or takes longer than GREETING_S
    seconds."""
    caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    caller.settimeout(None)
    # A time limit of each wait would not bound the total time.
    late = threading.Timer(GREETING_S, partial(_hang_up, caller))
    late.start()
    try:
        with Connection(os.dup(caller.fileno())) as link:
            for step in steps:
                step(link, key.encode())
    finally:
        late.cancel()


def _hang_up(caller: socket.socket) -> None:
    """Closes a connection, upon which waits for it end with an error."""
    with suppress(OSError):
        caller.shutdown(socket.SHUT_RDWR)

"""The door at which a process that was started elsewhere calls in. Whoever comes without its key is sent away."""

from __future__ import annotations

import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

from mmrl.children.channel import LOOK_S, Channel

KEY = "MMRL_CHILD_KEY"  # the environment's variable that tells a process the key; not for others' eyes


class Pair:
    """The way to a process on this host, which has the other end already."""

    def __init__(self) -> None:
        self.ours, self.theirs = socket.socketpair()

    def accept(self, look: Callable[[], None], limit_s: float) -> Channel:
        return Channel(self.ours)

    def close(self) -> None:
        self.ours.close()


class Listener:
    """Listens on `host` for the one process that knows its key."""

    def __init__(self, host: str) -> None:
        self.key = secrets.token_hex(32)
        self._listener = socket.create_server((host, 0))
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._come: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def accept(self, look: Callable[[], None], limit_s: float) -> Channel:
        """Awaits its call. look: called meanwhile; raises where it will not come. Raises TimeoutError."""
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            with suppress(queue.Empty):
                return Channel(self._come.get(timeout=LOOK_S))
            look()
        raise TimeoutError(f"no call in {limit_s:g} s")

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that listens
        self._listener.close()

    def _listen(self) -> None:
        while True:
            try:
                caller, _ = self._listener.accept()
            except OSError:  # it was closed
                return
            # Each in a thread of its own, so that one who says nothing keeps nobody waiting.
            threading.Thread(target=self._greet, args=(caller,), daemon=True).start()

    def _greet(self, caller: socket.socket) -> None:
        try:
            _challenge(caller, self.key, deliver_challenge, answer_challenge)
        except (AuthenticationError, EOFError, OSError, ValueError):
            caller.close()
        else:
            self._come.put(caller)


def dial(host: str, port: int, key: str) -> Channel:
    """The other side of a door. Raises OSError, EOFError or AuthenticationError where there is no such one."""
    caller = socket.create_connection((host, port))
    _challenge(caller, key, answer_challenge, deliver_challenge)
    return Channel(caller)


def _challenge(caller: socket.socket, key: str, *steps: Callable[[Connection, bytes], None]) -> None:
    """Each proves to the other that it knows the key, which is not sent."""
    caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    caller.settimeout(None)
    with Connection(os.dup(caller.fileno())) as link:
        for step in steps:
            step(link, key.encode())

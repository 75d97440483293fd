"""Where workers report after their start. Whoever comes without the key of this run is sent away."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

KEY = "MMRL_WORKER_KEY"  # the environment's variable that tells a worker the key
NAME = 256  # bytes of a name, at most


class Door:
    """Listens on `host`; a worker that has dialled in under a name waits there until it is fetched."""

    def __init__(self, host: str) -> None:
        self.key = secrets.token_hex(32)
        self._socket = socket.create_server((host, 0))
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self._come: dict[str, Connection] = {}
        self._arrival = threading.Condition()
        threading.Thread(target=self._listen, daemon=True).start()

    def fetch(self, name: str, seconds: float) -> Connection | None:
        """The one that came under this name, waited for so long."""
        end = time.monotonic() + seconds
        with self._arrival:
            while name not in self._come and (left := end - time.monotonic()) > 0:
                self._arrival.wait(left)
            return self._come.pop(name, None)

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that listens
        self._socket.close()
        with self._arrival:
            for link in self._come.values():
                link.close()

    def _listen(self) -> None:
        while True:
            try:
                caller, _ = self._socket.accept()
            except OSError:  # it was closed
                return
            # Each in a thread of its own, so that one who says nothing keeps nobody waiting.
            threading.Thread(target=self._greet, args=(caller,), daemon=True).start()

    def _greet(self, caller: socket.socket) -> None:
        link = linked(caller)
        try:
            deliver_challenge(link, self.key.encode())
            answer_challenge(link, self.key.encode())
            name = link.recv_bytes(NAME).decode()
        except (AuthenticationError, EOFError, OSError, ValueError):
            link.close()
            return
        with self._arrival:
            self._come[name] = link
            self._arrival.notify_all()


def dial(host: str, port: int, key: str, name: str) -> Connection:
    """The worker's side. Raises OSError, EOFError or AuthenticationError where there is no such door."""
    link = linked(socket.create_connection((host, port)))
    answer_challenge(link, key.encode())
    deliver_challenge(link, key.encode())
    link.send_bytes(name.encode())
    return link


def linked(caller: socket.socket) -> Connection:
    caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    caller.settimeout(None)
    return Connection(caller.detach())

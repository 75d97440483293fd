"""A pool of forked processes for untrusted code, which are killed at a deadline and replaced in milliseconds.

A fork server, a fresh interpreter, builds a service once and forks a worker whenever one is needed. The process that
owns it is never forked itself: it holds threads and perhaps a CUDA context. Requests are pickles, since workers trust
this process; answers are bounded messages of `mmrl.children.frames`, since workers are not trusted.
`mmrl.children.forked` is the code of fork server and workers.

This is no security boundary by itself: a worker has the user's rights, files and network, unless its service gives them
up (`mmrl.children.confinement`).
"""

from __future__ import annotations

import atexit
import pickle
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

from mmrl.children.channel import Channel, Patience
from mmrl.children.forked import DISMISS, ENLIST, ORDER
from mmrl.children.frames import decode_mapping
from mmrl.children.limits import Limits, clean_environment
from mmrl.children.processes import LocalProcess, end_group, module_path
from mmrl.errors import UserError

MAX_ANSWER = 1 << 16  # bytes
START_S = 120.0  # seconds for a new interpreter to import torch on a busy machine
ORDER_S = 20.0  # seconds for a fork server to fork or end a worker


class ForkServer:
    """A pool of worker processes that run a service of untrusted code. The fork server starts when a worker is first
    needed, restarts if it has ended, and ends with this process."""

    def __init__(self, service: str, arguments: Sequence[Any], limits: Limits, records: Collection[type] = ()) -> None:
        """service: "module:function", whose call with `arguments` returns the service. records: dataclasses that
        answers may hold."""
        self._setup, self._records = (service, tuple(arguments), limits), records
        self._opening = threading.Lock()
        self._running: ForkServerProcess | None = None
        _LIVE.add(self)

    def acquire(self) -> ForkedProcess:
        """Returns an idle process or a new one. Raises UserError if the service cannot be built, and ConnectionError if
        the fork server ends or does not answer."""
        with self._opening:
            if self._running is not None and self._running.process.poll() is not None:
                self._running.close()
                self._running = None
            self._running = self._running or ForkServerProcess(self._setup, self._records)
            return self._running.acquire()

    def close(self) -> None:
        """Ends all processes; `acquire` may start new ones later."""
        with self._opening:
            if self._running is not None:
                self._running.close()
            self._running = None


class ForkServerProcess:
    """The fork server's process, which builds a service and forks its workers. first: its first message, (service,
    arguments, limits). idle: workers that have no request. Raises UserError if it cannot build the service."""

    def __init__(self, first: tuple[str, tuple[Any, ...], Limits], records: Collection[type]) -> None:
        """Starts the fork server and waits until its service is built. first: name and arguments of the service, and
        the limits of its workers. records: dataclasses that answers may hold. Raises UserError if the service cannot be
        built."""
        self.records, self.idle = records, list[ForkedProcess]()
        self._ordering = threading.Lock()
        self._workers: dict[int, ForkedProcess] = {}
        ours, theirs = socket.socketpair()
        self._control = Channel(ours)
        with theirs:
            self.process = LocalProcess(
                [sys.executable, "-m", "mmrl.children.forked", str(theirs.fileno())],
                clean_environment() | module_path(None) | {"CUDA_VISIBLE_DEVICES": ""},
                descriptors=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        try:
            answer = self._control.ask(pickle.dumps(first), Patience(START_S), MAX_ANSWER)
            problem = decode_mapping(answer, records=())["problem"]
        except TimeoutError:
            problem = (
                f"it was not ready within {START_S:g} s in a process of its own; see whether its constructor hangs"
            )
        except (OSError, ValueError, KeyError) as error:
            problem = f"its process did not start: {error!r}"
        if problem is not None:
            self.close()
            raise UserError(str(problem))

    def acquire(self) -> ForkedProcess:
        """Returns an idle worker or forks one. Raises ConnectionError if the fork server has ended or does not
        answer."""
        with suppress(IndexError):
            return self.idle.pop()
        ours, theirs = socket.socketpair()
        with theirs:
            pid = int(self._order(ENLIST, 0, theirs.fileno())["pid"])
        self._workers[pid] = ForkedProcess(self, pid, Channel(ours))
        return self._workers[pid]

    def terminate(self, worker: ForkedProcess) -> str | None:
        """Kills a worker and all processes that it has started. Returns the reason if the fork server had already
        killed it, else None."""
        self._workers.pop(worker.pid, None)
        worker.channel.close()
        with suppress(ConnectionError):  # the worker has ended with its fork server
            return self._order(DISMISS, worker.pid)["reason"]
        return None

    def close(self) -> None:
        """Closes the control channel, upon which the fork server kills its workers and ends."""
        self._control.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(ORDER_S)
        self._end()

    def _end(self) -> None:
        """Kills remaining processes: a worker may have stopped or killed the fork server, or kept it busy."""
        if self.process.poll() != 0:
            self.process.kill()
            for pid in self._workers:
                end_group(pid)
        for worker in self._workers.values():
            worker.channel.close()
        self._workers = {}

    def _order(self, kind: bytes, pid: int, *descriptors: int) -> dict[str, Any]:
        """Sends the fork server an order about the worker `pid`, with open file descriptors, and returns its answer:
        "pid" and "reason", see `mmrl.children.forked`. Raises ConnectionAbortedError if none comes within ORDER_S
        seconds."""
        with self._ordering:
            try:
                self._control.socket.settimeout(ORDER_S)
                socket.send_fds(self._control.socket, [ORDER.pack(kind, pid)], descriptors)
                answer = decode_mapping(self._control.receive(Patience(ORDER_S), MAX_ANSWER), records=())
                return {"pid": int(answer["pid"]), "reason": answer["reason"]}
            except (OSError, ValueError, KeyError) as error:
                self._end()
                raise ConnectionAbortedError(f"its fork server ended: {error!r}") from error


class ForkedProcess:
    """A worker process, which leads a process group."""

    def __init__(self, fork_server: ForkServerProcess, pid: int, channel: Channel) -> None:
        self.fork_server, self.pid, self.channel = fork_server, pid, channel
        self._spent = False  # whether it must be replaced, see `Limits.spent`
        self._requests = 0

    def call(self, request: object, deadline_s: float, max_bytes: int = MAX_ANSWER) -> dict[str, Any]:
        """Returns the worker's answer to the request, at most `max_bytes` long. Raises TimeoutError, or ConnectionError
        for an invalid answer and if the worker ended or was killed. After either it cannot be called again."""
        self._requests += 1
        try:
            received = self.channel.ask(pickle.dumps((self._requests, request)), Patience(deadline_s), max_bytes)
            answer = decode_mapping(received, records=self.fork_server.records)
            if answer.get("number") != self._requests:
                raise ValueError("the answer belongs to another request")
        except (TimeoutError, ConnectionError, ValueError) as error:
            if (reason := self.fork_server.terminate(self)) is None and isinstance(error, TimeoutError):
                raise
            cause = " ".join(str(error).split())
            raise ConnectionAbortedError(reason or f"its process ended or sent an invalid answer ({cause})") from error
        self._spent = answer.get("spent") is True
        return answer

    def release(self) -> None:
        """Makes the worker idle, or ends it if it has used half of its CPU time (`Limits.spent`)."""
        if self._spent:
            self.fork_server.terminate(self)
        else:
            self.fork_server.idle.append(self)


_LIVE: weakref.WeakSet[ForkServer] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for fork_server in list(_LIVE):
        fork_server.close()

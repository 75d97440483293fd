"""`python -m mmrl.children.forked DESCRIPTOR`: a fork server that builds a service of untrusted code, and the workers
that it forks. A reward is one, an environment of turns another; see `mmrl.children.fork_server`.

An order to the fork server is one letter and a process id, with a socket where a worker shall be forked; its answer is
{"done": process id, "why": text where the fork server itself has ended that worker, else None}.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import pickle
import select
import signal
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any

from mmrl.children.channel import Channel
from mmrl.children.frames import encode
from mmrl.children.limits import LINUX, Limits, adopt_orphans, end_descendants, tasks_below
from mmrl.children.processes import end_group, end_with_forker, leave_signals_to_parent
from mmrl.errors import describe_error

ForkedService = Callable[[Any], dict[str, Any]]  # from a request, which may be any Python object, to a message
WATCH_S = 0.05  # between two counts of what workers have started
ENLIST, DISMISS = b"+", b"-"
ORDER = struct.Struct("!cQ")


def fork_server(control: Channel) -> None:
    """Builds the service that the first frame names, then forks workers as it is ordered; never returns. At the other
    side's end it kills all that it has started."""
    leave_signals_to_parent()
    adopt_orphans()
    workers: set[int] = set()
    ended: dict[int, str] = {}  # by the fork server, until the other side knows
    try:
        service, limits = _built(control)
        while order := _watched(control.socket, workers, ended, limits):
            kind, pid = ORDER.unpack(order[0])
            if kind == ENLIST:
                pid = _fork_worker(control, order[1][0], service, limits)
                workers.add(pid)
            elif pid in workers:
                _end(pid, workers)
            control.send(encode({"done": pid, "why": ended.pop(pid, None)}))
    except ConnectionError:
        pass  # the trainer has ended
    finally:
        for worker in workers:
            end_group(worker)
        end_descendants()
        os._exit(0)  # no exit handlers, which belong to the service


def _watched(
    control: socket.socket, workers: set[int], ended: dict[int, str], limits: Limits
) -> tuple[bytes, list[int]] | None:
    """Returns the next order and its sockets, None where the other side closed. Until then it watches the workers and
    kills one that has started more processes than `limits` allow, for RLIMIT_NPROC does not bind root."""
    while not select.select([control], [], [], WATCH_S if workers and LINUX else None)[0]:
        for pid in list(workers):
            if (count := tasks_below(pid)) > limits.processes:
                _end(pid, workers)
                ended[pid] = f"it has {count} processes and threads, more than limits.processes={limits.processes}"
    data, sockets, *_ = socket.recv_fds(control, ORDER.size, 1)
    return (data, sockets) if data else None


def _end(pid: int, workers: set[int]) -> None:
    """Kills a worker, its process group, and descendants that have left the group."""
    end_group(pid)
    workers.discard(pid)
    end_descendants(keep=workers)


def _built(control: Channel) -> tuple[ForkedService, Limits]:
    """Builds the service that the first message names, and reports success or the problem. Returns the service and the
    limits of its workers."""
    name, arguments, limits = pickle.loads(control.receive())
    _end_with(control.socket, True)  # also where the service hangs while it is built
    try:
        module, _, function = name.partition(":")
        service: ForkedService = vars(importlib.import_module(module))[function](*arguments)
    except Exception as error:
        control.send(encode({"problem": str(error) if isinstance(error, ValueError) else describe_error(error)}))
        raise ConnectionAbortedError from None
    _end_with(control.socket, False)
    control.send(encode({"problem": None}))
    return service, limits


def _end_with(control: socket.socket, ends: bool) -> None:
    """Sets whether the kernel ends this process at any event of the socket, such as the other side closing it."""
    if not LINUX:
        return
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    flags = fcntl.fcntl(control, fcntl.F_GETFL)
    fcntl.fcntl(control, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(control, fcntl.F_SETFL, flags | os.O_ASYNC if ends else flags & ~os.O_ASYNC)
    poll = select.poll()
    poll.register(control, 0)
    if ends and poll.poll(0):
        os._exit(0)


def _fork_worker(control: Channel, descriptor: int, service: ForkedService, limits: Limits) -> int:
    """Forks a worker that answers on the socket `descriptor`. Returns its process id."""
    pid = os.fork()
    if pid == 0:
        try:
            control.close()
            _work(Channel(socket.socket(fileno=descriptor)), service, limits)
        finally:
            os._exit(0)  # whatever happened, the fork server's own frames must not run on in a copy
    os.close(descriptor)
    return pid


def _work(channel: Channel, service: ForkedService, limits: Limits) -> None:
    """Serves one request a frame until the other side closes."""
    end_with_forker()
    adopt_orphans()
    os.setsid()
    limits.apply()
    while True:
        number, request = pickle.loads(channel.receive())
        answer = service(request)
        channel.send(encode(answer | {"number": number, "spent": limits.spent()}))


if __name__ == "__main__":
    fork_server(Channel(socket.socket(fileno=int(sys.argv[1]))))

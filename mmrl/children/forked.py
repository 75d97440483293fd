"""`python -m mmrl.children.forked DESCRIPTOR`: a fork server that builds a service of untrusted code, and the workers
that it forks. Isolated rewards and environments of conversations are such services; see `mmrl.children.fork_server`.

An order to the fork server is one letter and a process id: ENLIST, with a socket, to fork a worker, DISMISS to end one.
Its answer is {"pid": process id of the worker, "reason": why the fork server had already killed it, else None}.
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

ForkedService = Callable[[Any], dict[str, Any]]  # from a request, any Python object, to the answer
WATCH_S = 0.05  # seconds between two counts of the processes that workers have started
ENLIST, DISMISS = b"+", b"-"
ORDER = struct.Struct("!cQ")


def fork_server(control: Channel) -> None:
    """Builds the service that the first frame names, then follows orders; never returns. When the other process closes
    the channel or ends, it kills all processes that it has started."""
    leave_signals_to_parent()
    adopt_orphans()
    workers: set[int] = set()
    ended: dict[int, str] = {}  # workers that the fork server killed, and why, until this is reported
    try:
        service, limits = _build_service(control)
        while order := _next_order(control.socket, workers, ended, limits):
            kind, pid = ORDER.unpack(order[0])
            if kind == ENLIST:
                pid = _fork_worker(control, order[1][0], service, limits)
                workers.add(pid)
            elif pid in workers:
                _end(pid, workers)
            control.send(encode({"pid": pid, "reason": ended.pop(pid, None)}))
    except ConnectionError:
        pass  # the trainer has ended
    finally:
        for worker in workers:
            end_group(worker)
        end_descendants()
        os._exit(0)  # no exit handlers, which belong to the service


def _next_order(
    control: socket.socket, workers: set[int], ended: dict[int, str], limits: Limits
) -> tuple[bytes, list[int]] | None:
    """Waits for the next order and returns it with its sockets; None if the channel is closed. Meanwhile it kills
    workers that have started more processes than `limits` allow, since RLIMIT_NPROC does not apply to root."""
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


def _build_service(control: Channel) -> tuple[ForkedService, Limits]:
    """Builds the service that the first message names, and reports success or the problem. Returns the service and the
    limits of its workers."""
    name, arguments, limits = pickle.loads(control.receive())
    _end_with_socket(control.socket, True)  # also if building the service hangs
    try:
        module, _, function = name.partition(":")
        service: ForkedService = vars(importlib.import_module(module))[function](*arguments)
    except Exception as error:
        control.send(encode({"problem": str(error) if isinstance(error, ValueError) else describe_error(error)}))
        raise ConnectionAbortedError from None
    _end_with_socket(control.socket, False)
    control.send(encode({"problem": None}))
    return service, limits


def _end_with_socket(control: socket.socket, ends: bool) -> None:
    """Sets whether the kernel ends this process at any event of the socket, such as its end being closed by the other
    process."""
    if not LINUX:
        return
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    flags = fcntl.fcntl(control, fcntl.F_GETFL)
    fcntl.fcntl(control, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(control, fcntl.F_SETFL, flags | os.O_ASYNC if ends else flags & ~os.O_ASYNC)
    poll = select.poll()
    poll.register(control, 0)
    if ends and poll.poll(0):  # the other end was closed before the kernel watched the socket
        os._exit(0)


def _fork_worker(control: Channel, descriptor: int, service: ForkedService, limits: Limits) -> int:
    """Forks a worker that answers on the socket `descriptor`. Returns its process id."""
    pid = os.fork()
    if pid == 0:
        try:
            control.close()
            _serve_requests(Channel(socket.socket(fileno=descriptor)), service, limits)
        finally:
            os._exit(0)  # also after an exception: the fork server's loop must not continue in its copy
    os.close(descriptor)
    return pid


def _serve_requests(channel: Channel, service: ForkedService, limits: Limits) -> None:
    """Answers requests, one in each frame, until the channel is closed."""
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

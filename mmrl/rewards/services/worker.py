"""The processes of somebody else's code: a nursery that builds a service, and workers that it forks, which serve. A
reward is one (see `IsolatedReward`), an environment of turns another.

An order to the nursery is one letter and a process id, with a socket where a worker shall be forked; its answer is
{"done": process id, "why": text where the nursery itself has ended that worker, else null}. All answers are frames of
at most MAX_ANSWER bytes of JSON.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import pickle
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

from mmrl.errors import UserError, told
from mmrl.rewards.services.limits import (
    LINUX,
    Limits,
    adopt_orphans,
    end_descendants,
    end_group,
    end_with_parent,
    tasks_below,
)
from mmrl.rewards.types import Reward, load_object, numbers

Service = Callable[[Any], dict[str, Any]]  # from a request, which may be any Python object, to JSON
START_S = 120.0  # a new interpreter that imports torch on a busy machine
MAX_ANSWER = 1 << 16  # bytes
WATCH_S = 0.05  # between two counts of what workers have started
ENLIST, DISMISS = b"+", b"-"
ORDER = struct.Struct("!cQ")
_LENGTH = struct.Struct("!Q")


def send_frame(channel: socket.socket, data: bytes) -> None:
    channel.sendall(_LENGTH.pack(len(data)) + data)


def receive_frame(channel: socket.socket, limit_s: float | None, most: int | None = None) -> bytes:
    """The next frame. Raises TimeoutError after `limit_s` seconds, ConnectionError where the other side ended,
    ValueError for a frame of more than `most` bytes."""
    end = None if limit_s is None else time.monotonic() + limit_s

    def exactly(count: int) -> bytes:
        data = b""
        while len(data) < count:
            channel.settimeout(None if end is None else max(1e-3, end - time.monotonic()))
            chunk = channel.recv(min(count - len(data), 1 << 20))
            if not chunk:
                raise ConnectionResetError("the other side ended")
            data += chunk
            if end is not None and time.monotonic() > end:
                raise TimeoutError("it drips")
        return data

    (size,) = _LENGTH.unpack(exactly(_LENGTH.size))
    if most is not None and size > most:
        raise ValueError(f"an answer of {size} bytes")
    return exactly(size)


def receive_answer(channel: socket.socket, limit_s: float, most: int = MAX_ANSWER) -> dict[str, Any]:
    """The next frame as a JSON object; raises as `receive_frame`, and ValueError for anything else."""
    try:
        answer = json.loads(receive_frame(channel, limit_s, most))
    except RecursionError:
        raise ValueError("an answer of many levels") from None
    if not isinstance(answer, dict):
        raise ValueError("an answer that is no object")
    return answer


def _answer(channel: socket.socket, **fields: Any) -> None:
    send_frame(channel, json.dumps(fields).encode())


def nursery(descriptor: int) -> None:
    """Builds the service that the first frame names, then forks workers as it is ordered; never returns. At the other
    side's end it kills all that it has started."""
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what verifiers print is no result of a program's
    adopt_orphans()
    workers: set[int] = set()
    ended: dict[int, str] = {}  # by the nursery, until the other side knows
    with socket.socket(fileno=descriptor) as control:
        try:
            service, limits = _built(control)
            while order := _watched(control, workers, ended, limits):
                kind, pid = ORDER.unpack(order[0])
                if kind == ENLIST:
                    pid = _fork_worker(control, order[1][0], service, limits)
                    workers.add(pid)
                elif pid in workers:
                    _end(pid, workers)
                _answer(control, done=pid, why=ended.pop(pid, None))
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
    """The next order and its sockets; None at the other side's end. Until it comes workers are watched: one that has
    started more than it may is ended here, for RLIMIT_NPROC does not bind root."""
    while not select.select([control], [], [], WATCH_S if workers and LINUX else None)[0]:
        for pid in list(workers):
            if (count := tasks_below(pid)) > limits.processes:
                _end(pid, workers)
                ended[pid] = f"{count} processes and threads of it are more than limits.processes={limits.processes}"
    data, sockets, *_ = socket.recv_fds(control, ORDER.size, 1)
    return (data, sockets) if data else None


def _end(pid: int, workers: set[int]) -> None:
    """Ends a worker, its process group, and what has left that."""
    end_group(pid)
    workers.discard(pid)
    end_descendants(keep=workers)


def _built(control: socket.socket) -> tuple[Service, Limits]:
    maker, arguments, limits = pickle.loads(receive_frame(control, None))
    _end_with(control, True)  # also where the service hangs while it is built
    try:
        module, _, name = maker.partition(":")
        service: Service = vars(importlib.import_module(module))[name](*arguments)
    except Exception as error:
        _answer(control, problem=str(error) if isinstance(error, ValueError) else told(error))
        raise ConnectionAbortedError from None
    _end_with(control, False)
    _answer(control, problem=None)
    return service, limits


def _end_with(control: socket.socket, ends: bool) -> None:
    """Whether the kernel ends this process when something happens to the socket, as when the other side closes it."""
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


def _fork_worker(control: socket.socket, descriptor: int, service: Service, limits: Limits) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            control.close()
            _work(descriptor, service, limits)
        finally:
            os._exit(0)  # whatever happened, the nursery's own frames must not run on in a copy
    os.close(descriptor)
    return pid


def _work(descriptor: int, service: Service, limits: Limits) -> None:
    """Serves one request a frame until the other side closes."""
    end_with_parent()
    adopt_orphans()
    os.setsid()
    limits.apply()
    with socket.socket(fileno=descriptor) as channel:
        while True:
            number, request = pickle.loads(receive_frame(channel, None))
            answer = service(request)
            _answer(channel, number=number, spent=limits.spent(), **answer)


def scorer(name: str, options: dict[str, Any]) -> Service:
    """The reward `name(options)` of the registry as a service for samples. Raises ValueError where it can not be
    built."""
    try:
        reward: Any = load_object("mmrl.rewards.registry:build")(name, options, isolated=False)
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"reward {name!r}: {told(error)}") from error

    def score(sample: Any) -> dict[str, Any]:
        answer = _scored(reward, sample)
        end_descendants()  # what the reward started serves this sample only
        return answer

    return score


def _scored(reward: Reward, sample: Any) -> dict[str, Any]:
    try:
        return {"value": numbers([reward(sample)], 1)[0]}
    except UserError as error:
        return {"refused": str(error)}
    except BaseException as error:  # any fault of a verifier costs this sample only
        return {"raised": told(error)}

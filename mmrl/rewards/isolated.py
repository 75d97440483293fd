"""Rewards that may hang or crash, run in a process of their own that is killed at a deadline.

A nursery, a fresh interpreter, builds the reward once and forks a worker whenever one is needed, so a worker that was
killed is replaced in milliseconds. The training process itself is never forked: it holds threads and perhaps a CUDA
context. Messages are length-prefixed pickles over socket pairs, which no third party ever sees.
"""

from __future__ import annotations

import atexit
import logging
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mmrl.rollouts import Sample

START_S = 120.0  # a new interpreter that imports torch on a busy machine
_HEADER = struct.Struct("!Q")
_NURSERY = "import sys; from mmrl.rewards.isolated import nursery; nursery(int(sys.argv[1]))"
_log = logging.getLogger(__name__)


class IsolatedReward:
    """The reward `name(options)` of the registry, evaluated in a worker process; None where that fails.

    The worker starts at the first call and stays. One call may take `deadline_s` seconds: a verifier that hangs, or
    ends its process, costs its own sample, and the next call gets a new worker. `failures` counts the samples lost, by
    cause. Pictures stay behind: the worker sees the prompt without its images unless `images=True`.

    Raises ValueError at the first call if the reward cannot be built in its own process, RuntimeError if that process
    does not start.
    """

    def __init__(self, name: str, options: Mapping[str, Any], deadline_s: float, *, images: bool = False):
        self.name, self.options, self.deadline_s, self.images = name, dict(options), deadline_s, images
        self.failures = {"deadline": 0, "crash": 0, "error": 0}
        self._nursery: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        self._worker: tuple[int, socket.socket] | None = None
        _LIVE.add(self)

    def __call__(self, sample: Sample) -> float | None:
        self.start()
        assert self._worker is not None
        _, channel = self._worker
        stripped = sample if self.images else replace(sample, prompt=replace(sample.prompt, images=()))
        try:
            channel.settimeout(self.deadline_s)
            _send(channel, stripped)
            ok, value = _receive(channel, self.deadline_s)
        except TimeoutError:
            self._dismiss()
            return self._lost(sample, "deadline", f"no answer in {self.deadline_s:g} s")
        except ConnectionError:
            self._dismiss()
            return self._lost(sample, "crash", "its process ended")
        return value if ok else self._lost(sample, "error", value)

    def start(self) -> None:
        """Makes sure that a worker waits, so that the next call pays nothing for it."""
        if self._worker is not None:
            return
        if self._nursery is None or self._nursery[0].poll() is not None:
            self.close()
            self._nursery = self._open_nursery()
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._nursery[1], [b"!"], [theirs.fileno()])
        self._worker = (_receive(ours, START_S), ours)

    def close(self) -> None:
        """Ends the worker and its nursery; a later call starts others."""
        self._dismiss()
        if self._nursery is not None:
            process, control = self._nursery
            self._nursery = None
            control.close()
            process.kill()
            process.wait()

    def _dismiss(self) -> None:
        if self._worker is not None:
            pid, channel = self._worker
            self._worker = None
            _kill(pid)
            channel.close()

    def _lost(self, sample: Sample, cause: str, what: str) -> float | None:
        self.failures[cause] += 1
        _log.warning("reward %s could not score prompt %s: %s", self.name, sample.prompt.id, what)
        return None

    def _open_nursery(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", _NURSERY, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for the trainer, which then ends the worker
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "CUDA_VISIBLE_DEVICES": ""},
            )
        try:
            _send(ours, (self.name, self.options, self.deadline_s))
            ok, problem = _receive(ours, START_S)
        except (TimeoutError, ConnectionError) as error:
            process.kill()
            process.wait()
            raise RuntimeError(f"the process of reward {self.name!r} did not start: {error!r}") from error
        if not ok:
            process.wait()
            raise ValueError(problem)
        return process, ours


_LIVE: weakref.WeakSet[IsolatedReward] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for reward in list(_LIVE):
        reward.close()


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # it ended by itself


def _send(channel: socket.socket, message: Any) -> None:
    data = pickle.dumps(message)
    channel.sendall(_HEADER.pack(len(data)) + data)


def _receive(channel: socket.socket, deadline_s: float | None) -> Any:
    """The next message. Raises TimeoutError after `deadline_s` seconds, ConnectionError where the other side ended."""
    end = None if deadline_s is None else time.monotonic() + deadline_s

    def exactly(count: int) -> bytes:
        data = b""
        while len(data) < count:
            channel.settimeout(None if end is None else max(1e-3, end - time.monotonic()))
            chunk = channel.recv(count - len(data))
            if not chunk:
                raise ConnectionResetError("the other side ended")
            data += chunk
        return data

    return pickle.loads(exactly(_HEADER.unpack(exactly(_HEADER.size))[0]))


def nursery(descriptor: int) -> None:
    """Builds the reward that the first message names, then forks a worker for each socket it is handed, to the end."""
    from mmrl.rewards.registry import build

    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what verifiers print is no result of a program's
    with socket.socket(fileno=descriptor) as control:
        name, options, deadline_s = _receive(control, None)
        try:
            reward = build(name, options, isolated=False)
        except ValueError as error:
            return _send(control, (False, str(error)))
        _send(control, (True, None))
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # workers that end leave nothing to wait for
        while (handed := socket.recv_fds(control, 1, 1))[0]:
            if os.fork() == 0:
                control.close()
                _work(handed[1][0], reward, deadline_s)
            os.close(handed[1][0])
    return None


def _work(descriptor: int, reward: Any, deadline_s: float) -> None:
    """Scores one sample a message until the other side closes; never returns."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        with socket.socket(fileno=descriptor) as channel:
            _send(channel, os.getpid())
            while True:
                sample = _receive(channel, None)
                signal.setitimer(signal.ITIMER_REAL, 2 * deadline_s)  # ends a hanging worker whose trainer was killed
                reply: tuple[bool, Any]
                try:
                    reply = (True, reward(sample))
                except Exception as error:  # any fault of a verifier costs this sample only
                    reply = (False, repr(error))
                signal.setitimer(signal.ITIMER_REAL, 0)
                _send(channel, reply)
    finally:
        os._exit(0)  # whatever happened, the nursery's own frames must not run on in a copy

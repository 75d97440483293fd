"""Rewards that may hang or crash, run in a process of their own that is killed at a deadline.

The worker is a fresh interpreter: forking a process that holds torch's threads or a CUDA context can deadlock. It talks
over its standard streams in length-prefixed pickles, which no third party ever sees.
"""

from __future__ import annotations

import atexit
import logging
import os
import pickle
import selectors
import signal
import struct
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import IO, Any

from mmrl.rollouts import Sample

START_S = 120.0  # a new interpreter that imports torch on a busy machine
_HEADER = struct.Struct("!Q")
_log = logging.getLogger(__name__)


class WorkerLost(Exception):
    """The worker ended, or did not answer in time."""


class IsolatedReward:
    """The reward `name(options)` of the registry, evaluated in a worker process; None where that fails.

    The worker starts at the first call and stays. One call may take `deadline_s` seconds: a verifier that hangs, or
    ends its process, costs its own sample, and the next call gets a new worker. `failures` counts the samples lost, by
    cause. Pictures stay behind: the worker sees the prompt without its images unless `images=True`.

    Raises ValueError at the first call if the reward cannot be built in the worker.
    """

    def __init__(self, name: str, options: Mapping[str, Any], deadline_s: float, *, images: bool = False):
        self.name, self.options, self.deadline_s, self.images = name, dict(options), deadline_s, images
        self.failures = {"deadline": 0, "crash": 0, "error": 0}
        self._worker: subprocess.Popen[bytes] | None = None
        _LIVE.add(self)

    def __call__(self, sample: Sample) -> float | None:
        if not self.images:
            sample = replace(sample, prompt=replace(sample.prompt, images=()))
        worker = self._running()
        try:
            self._send(worker, sample)
            ok, value = self._receive(worker, self.deadline_s)
        except TimeoutError as error:
            self.close()
            return self._lost(sample, "deadline", str(error))
        except (WorkerLost, BrokenPipeError):
            self.close()
            return self._lost(sample, "crash", f"the worker ended with exit code {worker.returncode}")
        if ok:
            return value
        return self._lost(sample, "error", value)

    def start(self) -> None:
        """Starts the worker now and waits until the reward is built, so that the first call pays nothing for it."""
        self._running()

    def close(self) -> None:
        """Ends the worker; a later call starts another."""
        worker, self._worker = self._worker, None
        if worker is None:
            return
        worker.kill()
        worker.wait()  # a worker that ended by itself keeps its own exit code
        for stream in (worker.stdin, worker.stdout):
            if stream is not None:
                stream.close()

    def _lost(self, sample: Sample, cause: str, what: str) -> float | None:
        self.failures[cause] += 1
        _log.warning("reward %s could not score prompt %s: %s", self.name, sample.prompt.id, what)
        return None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._worker is None:
            self._worker = subprocess.Popen(
                [sys.executable, "-c", "from mmrl.rewards.isolated import work; work()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,  # Ctrl-C is for the trainer, which then ends the worker
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "CUDA_VISIBLE_DEVICES": ""},
            )
            try:
                self._send(self._worker, (self.name, self.options, self.deadline_s))
                ok, problem = self._receive(self._worker, START_S)
            except (TimeoutError, WorkerLost, BrokenPipeError) as error:
                self.close()
                raise RuntimeError(f"the worker of reward {self.name!r} did not start: {error!r}") from error
            if not ok:
                self.close()
                raise ValueError(problem)
        return self._worker

    @staticmethod
    def _send(worker: subprocess.Popen[bytes], message: Any) -> None:
        assert worker.stdin is not None
        _write(worker.stdin, message)

    @staticmethod
    def _receive(worker: subprocess.Popen[bytes], deadline_s: float) -> Any:
        assert worker.stdout is not None
        end = time.monotonic() + deadline_s
        with selectors.DefaultSelector() as selector:
            selector.register(worker.stdout, selectors.EVENT_READ)

            def exactly(count: int) -> bytes:
                data = b""
                while len(data) < count:
                    if not selector.select(max(0.0, end - time.monotonic())):
                        raise TimeoutError(f"no answer in {deadline_s:g} s")
                    chunk = os.read(worker.stdout.fileno(), count - len(data))  # type: ignore[union-attr]
                    if not chunk:
                        raise WorkerLost("the worker ended")
                    data += chunk
                return data

            (size,) = _HEADER.unpack(exactly(_HEADER.size))
            return pickle.loads(exactly(size))


_LIVE: weakref.WeakSet[IsolatedReward] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for reward in list(_LIVE):
        reward.close()


def _write(stream: IO[bytes], message: Any) -> None:
    data = pickle.dumps(message)
    view = memoryview(_HEADER.pack(len(data)) + data)
    while view:  # an unbuffered pipe may take a part only
        view = view[stream.write(view) :]


def work() -> None:
    """Builds the reward named in the first message, then scores one sample a message until the input ends."""
    from mmrl.rewards.registry import build

    requests = sys.stdin.buffer
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a verifier prints must not break the protocol

    def read() -> Any:
        header = requests.read(_HEADER.size)
        return pickle.loads(requests.read(_HEADER.unpack(header)[0])) if header else None

    name, options, deadline_s = read()
    try:
        reward = build(name, options, isolated=False)
    except ValueError as error:
        return _write(replies, (False, str(error)))
    _write(replies, (True, None))
    while (sample := read()) is not None:
        signal.setitimer(signal.ITIMER_REAL, 2 * deadline_s)  # ends a hanging worker whose parent was killed
        reply: tuple[bool, Any]
        try:
            reply = (True, reward(sample))
        except Exception as error:  # any fault of a verifier costs this sample only
            reply = (False, repr(error))
        signal.setitimer(signal.ITIMER_REAL, 0)
        _write(replies, reply)
    return None

"""Rewards that nobody vouches for, run in processes of their own that are killed at a deadline.

A nursery, a fresh interpreter, builds the reward once and forks a worker whenever one is needed, so a worker that was
killed is replaced in milliseconds. The training process itself is never forked: it holds threads and perhaps a CUDA
context. Samples go out as pickles, which a worker may trust; answers come back as short JSON, for nothing that comes
from a worker is trusted. `mmrl.rewards.services.worker` is the other side.

It is a net, no prison: a worker has the user's name, files and network.
"""

from __future__ import annotations

import atexit
import os
import pickle
import queue
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

from mmrl.errors import UserError
from mmrl.rewards.services.failures import Failure, Failures
from mmrl.rewards.services.limits import Limits, clean_environment, end_group
from mmrl.rewards.services.worker import DISMISS, ENLIST, MAX_ANSWER, ORDER, START_S, receive_answer, send_frame
from mmrl.rewards.types import Score, numbers
from mmrl.rollouts import Sample

WORKERS = 2
SCORER = "mmrl.rewards.services.worker:scorer"
ORDER_S = 20.0  # for a nursery to fork or end a worker
_NURSERY = "import sys; from mmrl.rewards.services.worker import nursery; nursery(int(sys.argv[1]))"


class IsolatedReward:
    """The reward `name(options)` of the registry, evaluated by `workers` processes; where that fails the sample is
    counted in `failures`.

    Workers start at the first call and stay. One sample may take `deadline_s` seconds: a verifier that hangs, or ends
    its process, costs its own sample, and the next one gets a new worker. Each worker leads a process group of its own,
    uses no more than `limits` allow and sees no credential in its environment; what it has started ends with each
    answer, and all ends with this process, however that ends. Pictures stay behind: a worker sees the prompt without
    its images unless `images=True`.

    score() raises UserError if the reward cannot be built in its own process, if that process does not start, and for a
    value that is no number.
    """

    scope: Literal["sample"] = "sample"

    def __init__(
        self,
        name: str,
        options: Mapping[str, Any],
        deadline_s: float,
        *,
        failures: Failures | None = None,
        workers: int = WORKERS,
        limits: Limits | None = None,
        images: bool = False,
    ):
        self.name, self.options, self.deadline_s, self.images = name, dict(options), deadline_s, images
        self.failures, self.workers = failures or Failures(name), workers
        self.limits = limits or Limits()
        self._nursery: Nursery | None = None
        self._idle: queue.SimpleQueue[RewardProcess | None] = queue.SimpleQueue()  # None: one that has to be started
        self._opening = threading.Lock()
        _LIVE.add(self)

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        self.failures.begin()
        with ThreadPoolExecutor(self.workers, "isolated-reward") as pool:
            return list(pool.map(self._score, samples))

    def close(self) -> None:
        """Ends all workers and their nursery; a later call starts others."""
        with self._opening:
            self._idle = queue.SimpleQueue()
            if self._nursery is not None:
                self._nursery.close()
                self._nursery = None

    def _score(self, sample: Sample) -> Score:
        if (skipped := self.failures.skips()) is not None:
            return self.failures.lost(sample, skipped)
        stripped = sample if self.images else replace(sample, prompt=replace(sample.prompt, images=()))
        nursery = self._opened()
        idle = self._idle
        worker = idle.get()
        try:
            worker = worker or nursery.enlist()
            answer = worker.ask(stripped, self.deadline_s)
        except TimeoutError:
            answer = self.failures.waited(self.deadline_s)
        except (ConnectionError, ValueError) as error:
            answer = Failure("crash", f"its process ended or answered nonsense ({' '.join(str(error).split())})")
        except UserError:
            idle.put(worker)
            raise
        if worker is not None and (worker.spent or (isinstance(answer, Failure) and answer.cause != "error")):
            why = nursery.dismiss(worker)
            answer = Failure("crash", why) if why is not None and isinstance(answer, Failure) else answer
            worker = None
        idle.put(worker)
        return self.failures.lost(sample, answer) if isinstance(answer, Failure) else answer

    def _opened(self) -> Nursery:
        with self._opening:
            if self._nursery is None or self._nursery.process.poll() is not None:
                if self._nursery is not None:
                    self._nursery.close()
                self._nursery = Nursery(SCORER, (self.name, self.options), self.limits)
                self._idle = queue.SimpleQueue()
                for _ in range(self.workers):
                    self._idle.put(None)
            return self._nursery


class Nursery:
    """The process that builds a service and forks its workers. maker: the "module:function" that makes the service of
    `arguments`. Raises UserError where it cannot."""

    def __init__(self, maker: str, arguments: Sequence[Any], limits: Limits) -> None:
        self._ordering = threading.Lock()
        self._workers: dict[int, RewardProcess] = {}
        self._control, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _NURSERY, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for the trainer, which then ends the workers
                env=clean_environment()
                | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "CUDA_VISIBLE_DEVICES": ""},
            )
        try:
            self._control.settimeout(START_S)
            send_frame(self._control, pickle.dumps((maker, tuple(arguments), limits)))
            problem = receive_answer(self._control, START_S)["problem"]
        except (OSError, ValueError, KeyError) as error:
            self.close()
            raise UserError(f"its process did not start: {error!r}") from error
        if problem is not None:
            self.close()
            raise UserError(str(problem))

    def enlist(self) -> RewardProcess:
        """A new worker. Raises ConnectionError where the nursery has ended or does not answer."""
        ours, theirs = socket.socketpair()
        with theirs:
            pid = int(self._order(ENLIST, 0, theirs.fileno())["done"])
        self._workers[pid] = RewardProcess(pid, ours)
        return self._workers[pid]

    def dismiss(self, worker: RewardProcess) -> str | None:
        """Kills the worker and all that it has started; why the nursery had done so before, where it had."""
        self._workers.pop(worker.pid, None)
        worker.channel.close()
        with suppress(ConnectionError):  # then it has ended with its nursery
            return self._order(DISMISS, worker.pid).get("why")
        return None

    def close(self) -> None:
        """The nursery kills its workers and ends when nobody listens to it."""
        self._control.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(ORDER_S)
        self._end()

    def _end(self) -> None:
        """A worker may have stopped or killed the nursery, or kept it busy: then its workers' groups end from here."""
        if self.process.poll() != 0:
            self.process.kill()
            self.process.wait()
            for pid in self._workers:
                end_group(pid)
        for worker in self._workers.values():
            worker.channel.close()
        self._workers = {}

    def _order(self, kind: bytes, pid: int, *descriptors: int) -> dict[str, Any]:
        with self._ordering:
            try:
                self._control.settimeout(ORDER_S)
                socket.send_fds(self._control, [ORDER.pack(kind, pid)], descriptors)
                answer = receive_answer(self._control, ORDER_S)
                return {"done": int(answer["done"]), "why": answer["why"]}
            except (OSError, ValueError, KeyError) as error:
                self._end()
                raise ConnectionAbortedError(f"its nursery ended: {error!r}") from error


class RewardProcess:
    """One process that serves; its process group has its id."""

    def __init__(self, pid: int, channel: socket.socket) -> None:
        self.pid, self.channel = pid, channel
        self.spent = False  # it wants to be replaced
        self._asked = 0

    def call(self, request: Any, deadline_s: float, most: int = MAX_ANSWER) -> dict[str, Any]:
        """What the service answers, in at most so many bytes of JSON. Raises TimeoutError, ConnectionError, and
        ValueError for an answer that cannot be read."""
        self._asked += 1
        self.channel.settimeout(deadline_s)
        send_frame(self.channel, pickle.dumps((self._asked, request)))
        answer = receive_answer(self.channel, deadline_s, most)
        if answer.get("number") != self._asked:
            raise ValueError("an answer to nothing that was asked")
        self.spent = answer.get("spent") is True
        return answer

    def ask(self, sample: Sample, deadline_s: float) -> Score | Failure:
        """Of a reward. Raises as `call`, and UserError for a value that is no number."""
        answer = self.call(sample, deadline_s)
        if "refused" in answer:
            raise UserError(str(answer["refused"]))
        if "raised" in answer:
            return Failure("error", str(answer["raised"]))
        return numbers([answer.get("value")], 1)[0]


_LIVE: weakref.WeakSet[IsolatedReward] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for reward in list(_LIVE):
        reward.close()

"""Guards rewards in this process: a fault of a reward costs its samples, never the run."""

from __future__ import annotations

import ctypes
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeVar

import torch

from mmrl.errors import UserError, describe_error
from mmrl.rewards.services.failures import Failure, Failures
from mmrl.rewards.services.spans import checked
from mmrl.rewards.types import BatchReward, Reward, Score
from mmrl.rollouts import Sample, Spans

Argument = TypeVar("Argument")
Value = TypeVar("Value")

MOST_STUCK = 8  # threads that run on after their deadline, before the run ends
FORK_POLL_S = 0.5


class GuardedReward:
    """A batched reward around any reward: samples on which it raises, or that take longer than `deadline_s` seconds,
    are counted in `failures`.

    Where a batch raises, its halves are tried, and so on: only samples that raise by themselves are lost. A group, and
    a batch that takes too long, is lost as a whole. With a deadline the reward runs in a separate thread, which is
    abandoned where it does not end; os._exit and memory limits need `IsolatedReward`.

    Raises UserError as the reward does, for a wrong number of values or one that is not a number, and if too many calls
    run on after their deadline.
    """

    def __init__(self, reward: Reward | BatchReward, failures: Failures, deadline_s: float | None) -> None:
        self.reward, self.failures, self.deadline_s = reward, failures, deadline_s
        self.scope: Literal["sample", "group", "batch"] = reward.scope if isinstance(reward, BatchReward) else "sample"
        self._calls = TimedCalls("isolated: true")

    def score(self, samples: Sequence[Sample]) -> list[Score | Spans]:
        if isinstance(self.reward, BatchReward):
            return self._batch(self.reward.score, list(samples))
        return [self._one(self.reward, sample) for sample in samples]

    def _one(self, reward: Reward, sample: Sample) -> Score | Spans:
        value = self._attempt(reward, sample)
        if isinstance(value, Failure):
            return self.failures.lost(sample, value)
        return checked([value], [sample], self.failures)[0]

    def _batch(self, score: Callable[[list[Sample]], Any], samples: list[Sample]) -> list[Score | Spans]:
        """Scores samples; where the call fails, halves them until the failing sample is alone. One that can not be
        scored is recorded as lost."""
        values = self._attempt(lambda part: _listed(score(part)), samples)
        if not isinstance(values, Failure):
            return checked(values, samples, self.failures)
        if values.cause in ("deadline", "not tried") or self.scope != "sample" or len(samples) == 1:
            return [self.failures.lost(sample, values) for sample in samples]
        half = len(samples) // 2
        return [*self._batch(score, samples[:half]), *self._batch(score, samples[half:])]

    def _attempt(self, function: Callable[[Argument], Value], argument: Argument) -> Value | Failure:
        """Returns the function's value, or the Failure."""
        if (skipped := self.failures.skips()) is not None:
            return skipped
        try:
            return function(argument) if self.deadline_s is None else self._calls(function, argument, self.deadline_s)
        except UserError:
            raise
        except TimeLimit:
            assert self.deadline_s is not None
            return self.failures.waited(self.deadline_s)
        except (Exception, SystemExit) as error:
            return Failure("error", describe_error(error))


class TimedCalls:
    """Calls with a time limit, in a thread that is abandoned where a call does not end. remedy: the setting that ends
    what hangs, for the message."""

    def __init__(self, remedy: str) -> None:
        self._remedy = remedy
        self._thread: CallingThread | None = None
        self._stuck: list[CallingThread] = []

    def __call__(self, function: Callable[[Argument], Value], argument: Argument, deadline_s: float) -> Value:
        """Returns or raises what the function does. Raises TimeLimit, and UserError where too many calls run on."""
        self._thread = self._thread or CallingThread()
        try:
            return self._thread.call(function, argument, deadline_s)
        except TimeLimit:
            self._stuck = [thread for thread in (*self._stuck, self._thread) if thread.leave()]
            self._thread = None
            if len(self._stuck) > MOST_STUCK:
                raise UserError(
                    f"{len(self._stuck)} of its calls still run after their deadline of {deadline_s:g} s; set "
                    f"{self._remedy}, which ends what hangs"
                ) from None
            raise


class TimeLimit(BaseException):
    """Raised when a call took too long, in the caller and in the call. It is not an Exception, so that the call does
    not catch it."""


class CallingThread:
    """A thread that runs calls with a time limit. It uses the GPU of the thread that made it."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[Any], Any], Any] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._thread = threading.Thread(target=self._serve, args=(device,), name="reward", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[Argument], Value], argument: Argument, limit_s: float) -> Value:
        """Returns or raises what the function does; what is not an Exception (such as SystemExit) is raised as a
        RuntimeError. Raises TimeLimit after `limit_s` seconds; then only `leave` may follow."""
        self._calls.put((function, argument))
        try:
            result, error = self._results.get(timeout=limit_s)
        except queue.Empty:
            raise TimeLimit from None
        if error is not None:
            raise error if isinstance(error, Exception) else RuntimeError(describe_error(error))
        return result

    def end(self) -> None:
        """Ends the thread after its last call."""
        self._calls.put(None)

    def leave(self) -> bool:
        """Raises TimeLimit in the call, between two Python instructions. Returns whether the thread still runs."""
        self.end()
        if self._thread.is_alive():
            identity = ctypes.c_ulong(self._thread.ident or 0)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(identity, ctypes.py_object(TimeLimit))
            self._thread.join(0.2)
        return self._thread.is_alive()

    def _serve(self, device: int | None) -> None:
        """Runs calls of the queue until None comes; results and exceptions go to the caller. device: the GPU of this
        thread."""
        _SERVING.add(threading.get_ident())
        if device is not None:
            torch.cuda.set_device(device)
        try:
            while (call := self._calls.get()) is not None:
                function, argument = call
                answer: tuple[Any, BaseException | None]
                try:
                    answer = function(argument), None
                except TimeLimit:
                    raise
                except BaseException as error:  # the caller raises it
                    answer = None, error
                self._results.put(answer)
        except TimeLimit:
            return  # the caller has left
        finally:
            _SERVING.discard(threading.get_ident())


_SERVING: set[int] = set()  # identities of the threads in which a user's code is called
_PROCESS = [os.getpid()]  # of this process; a fork has that of its parent until its hook has run


def _watch_parent() -> None:
    """Ends a process that a user's code has forked, within FORK_POLL_S seconds of the end of the one that it was forked
    from; else it would go on in its place, with all of its memory."""
    # Not os.getppid(): where the parent has ended by now, that is another process already.
    parent, _PROCESS[0] = _PROCESS[0], os.getpid()
    if threading.get_ident() in _SERVING:
        threading.Thread(target=_end_behind, args=(parent,), daemon=True).start()


def _end_behind(parent: int) -> None:
    """Ends this process once its parent, a process id, has ended."""
    while os.getppid() == parent:
        time.sleep(FORK_POLL_S)
    os._exit(1)


os.register_at_fork(after_in_child=_watch_parent)


def _listed(values: Any) -> Any:
    """Returns a list of an iterable: a generator that raises costs samples here."""
    return list(values) if isinstance(values, Iterable) else values

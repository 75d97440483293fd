"""Guards rewards that run in this process: a fault of a reward costs its samples, never the run."""

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
from mmrl.rewards.services.spans import check_values
from mmrl.rewards.types import BatchReward, Reward, Score
from mmrl.rollouts import Sample, Spans

Argument = TypeVar("Argument")
Value = TypeVar("Value")

MAX_STUCK = 8  # threads that still run after their deadline; more of them end the run
FORK_POLL_S = 0.5  # seconds after which a forked process checks again whether its parent still runs


class GuardedReward:
    """A batched reward around any reward. Samples on which it raises, or that take longer than `deadline_s` seconds,
    are counted in `failures`.

    If a batch raises, its halves are tried, and so on, so that only samples that raise by themselves are lost. A group,
    and a batch that takes too long, is lost as a whole. With a deadline the reward runs in a thread, which is abandoned
    if it does not end. Only `IsolatedReward` survives os._exit and enforces memory limits.

    Raises UserError if the reward raises it, for a wrong number of values, for a value that is not a number, and if too
    many calls still run after their deadline.
    """

    def __init__(self, reward: Reward | BatchReward, failures: Failures, deadline_s: float | None) -> None:
        self.reward, self.failures, self.deadline_s = reward, failures, deadline_s
        self.scope: Literal["sample", "group", "batch"] = reward.scope if isinstance(reward, BatchReward) else "sample"
        self._calls = TimedCalls("isolated: true")

    def score(self, samples: Sequence[Sample]) -> list[Score | Spans]:
        if isinstance(self.reward, BatchReward):
            return self._score_batch(self.reward.score, list(samples))
        return [self._score_sample(self.reward, sample) for sample in samples]

    def _score_sample(self, reward: Reward, sample: Sample) -> Score | Spans:
        """Scores one sample. A failure is recorded and becomes its score."""
        value = self._attempt(reward, sample)
        if isinstance(value, Failure):
            return self.failures.record(sample, value)
        return check_values([value], [sample], self.failures)[0]

    def _score_batch(self, score: Callable[[list[Sample]], Any], samples: list[Sample]) -> list[Score | Spans]:
        """Scores samples. If the call fails, it halves them until a failing sample is alone, which is recorded."""
        values = self._attempt(lambda part: _as_list(score(part)), samples)
        if not isinstance(values, Failure):
            return check_values(values, samples, self.failures)
        if values.cause in ("deadline", "not tried") or self.scope != "sample" or len(samples) == 1:
            return [self.failures.record(sample, values) for sample in samples]
        half = len(samples) // 2
        return [*self._score_batch(score, samples[:half]), *self._score_batch(score, samples[half:])]

    def _attempt(self, function: Callable[[Argument], Value], argument: Argument) -> Value | Failure:
        """Returns function(argument); a Failure if that raises or takes too long. If too many calls of this batch have
        timed out, returns a Failure without a call."""
        if (failure := self.failures.skipped()) is not None:
            return failure
        try:
            return function(argument) if self.deadline_s is None else self._calls(function, argument, self.deadline_s)
        except UserError:
            raise
        except TimeLimit:
            assert self.deadline_s is not None
            return self.failures.record_timeout(self.deadline_s)
        except (Exception, SystemExit) as error:
            return Failure("error", describe_error(error))


class TimedCalls:
    """Calls with a time limit, in a thread that is abandoned if a call does not end. remedy: the setting that would end
    a hanging call, for the message."""

    def __init__(self, remedy: str) -> None:
        self._remedy = remedy
        self._thread: CallingThread | None = None
        self._stuck: list[CallingThread] = []

    def __call__(self, function: Callable[[Argument], Value], argument: Argument, deadline_s: float) -> Value:
        """Returns function(argument), or raises its exception. Raises TimeLimit after `deadline_s` seconds, and
        UserError if more than MAX_STUCK abandoned calls still run."""
        self._thread = self._thread or CallingThread()
        try:
            return self._thread.call(function, argument, deadline_s)
        except TimeLimit:
            # `leave` tries to end the call, and returns whether it still runs
            self._stuck = [thread for thread in (*self._stuck, self._thread) if thread.leave()]
            self._thread = None
            if len(self._stuck) > MAX_STUCK:
                raise UserError(
                    f"{len(self._stuck)} of its calls passed the deadline of {deadline_s:g} s and still run; set "
                    f"{self._remedy}, which ends hanging calls"
                ) from None
            raise


class TimeLimit(BaseException):
    """Raised when a call takes too long, in the caller and inside the call. It is not an Exception, so that the call
    does not catch it."""


def call_in_time(function: Callable[[], Value], limit_s: float) -> Value:
    """Returns function(), or raises its exception. Raises TimeLimit after `limit_s` seconds; the call is then abandoned
    in its thread.

    The timeouts of sockets bound the wait for each byte only. So a server that sends a header byte by byte, or "100
    Continue" again and again, would keep its client waiting forever.
    """
    thread = CallingThread()
    try:
        value = thread.call(lambda _: function(), None, limit_s)
    except TimeLimit:
        thread.leave()
        raise
    except BaseException:
        thread.end()
        raise
    thread.end()
    return value


class CallingThread:
    """A thread that runs calls with a time limit, on the GPU of the thread that created it."""

    def __init__(self) -> None:
        # calls as (function, argument), None to end the thread; then (result, None) or (None, exception)
        self._calls: queue.SimpleQueue[tuple[Callable[[Any], Any], Any] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._thread = threading.Thread(target=self._serve, args=(device,), name="reward", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[Argument], Value], argument: Argument, limit_s: float) -> Value:
        """Returns function(argument), or raises its exception; a BaseException, such as SystemExit, is raised as a
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
        """Abandons the running call: raises TimeLimit inside it, between two Python instructions. Returns whether the
        thread still runs."""
        self.end()
        if self._thread.is_alive():
            identity = ctypes.c_ulong(self._thread.ident or 0)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(identity, ctypes.py_object(TimeLimit))
            self._thread.join(0.2)
        return self._thread.is_alive()

    def _serve(self, device: int | None) -> None:
        """Runs calls of the queue until None comes; results and exceptions go to the caller. device: the GPU to use."""
        _SERVING.add(threading.get_ident())  # for processes that a call forks, see `_watch_parent`
        if device is not None:
            torch.cuda.set_device(device)
        try:
            while (call := self._calls.get()) is not None:
                function, argument = call
                result: tuple[Any, BaseException | None]
                try:
                    result = function(argument), None
                except TimeLimit:
                    raise
                except BaseException as error:  # the caller raises it
                    result = None, error
                self._results.put(result)
        except TimeLimit:
            return  # the caller has left
        finally:
            _SERVING.discard(threading.get_ident())


_SERVING: set[int] = set()  # identifiers of the threads that run a user's code
_PROCESS = [os.getpid()]  # id of this process; in a fork, the parent's id until the hook below has run


def _watch_parent() -> None:
    """Runs in every forked process. If a user's code has forked it, starts a thread that ends it within FORK_POLL_S
    seconds of the end of its parent. Otherwise it would outlive the run, with all of its memory."""
    # The parent's id from before the fork: if the parent has ended by now, os.getppid() is the id of another process.
    parent, _PROCESS[0] = _PROCESS[0], os.getpid()
    if threading.get_ident() in _SERVING:  # the thread that forked runs a user's code
        threading.Thread(target=_exit_after_parent, args=(parent,), daemon=True).start()


def _exit_after_parent(parent: int) -> None:
    """Ends this process once its parent, a process id, has ended."""
    while os.getppid() == parent:
        time.sleep(FORK_POLL_S)
    os._exit(1)


os.register_at_fork(after_in_child=_watch_parent)


def _as_list(values: Any) -> Any:
    """Converts an iterable to a list, so that a generator that raises does so here."""
    return list(values) if isinstance(values, Iterable) else values

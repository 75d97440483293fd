"""Calls of untrusted code, or of a server, with a time limit: each in a thread that is abandoned if the call does not
end."""

from __future__ import annotations

import ctypes
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from mmrl.errors import UserError, describe_error
from mmrl.runtime.user_code import settings_restored
from mmrl.runtime.watchdog import ends_process

Argument = TypeVar("Argument")
Value = TypeVar("Value")

MAX_STUCK = 8  # threads that still run after their deadline; more of them end the run
GRACE_S = 10.0  # seconds after the deadline in which this process must have abandoned a call
FORK_POLL_S = 0.5  # seconds after which a forked process checks again whether its parent still runs


class TimedCalls:
    """Calls with a time limit, in a thread that is abandoned if a call does not end. A call that holds Python's
    interpreter cannot be abandoned: then this process ends GRACE_S seconds after the deadline, with one line on stderr.

    name: whose calls they are, and remedy: the setting that would end a hanging call, for messages.
    """

    def __init__(self, name: str, remedy: str) -> None:
        self._name, self._remedy = name, remedy
        self._thread: CallingThread | None = None
        self._stuck: list[CallingThread] = []

    def __call__(self, function: Callable[[Argument], Value], argument: Argument, deadline_s: float) -> Value:
        """Returns function(argument), or raises its exception. Raises TimeLimit after `deadline_s` seconds, and
        UserError if more than MAX_STUCK abandoned calls still run."""
        self._thread = self._thread or CallingThread()
        message = (
            f"mmrl: {self._name} did not return within {deadline_s:g} s and cannot be abandoned, since it holds "
            f"Python's interpreter; set {self._remedy}, which ends hanging calls; the run ends"
        )
        try:
            with ends_process(deadline_s + GRACE_S, message), settings_restored(self._name):
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
        self._thread = threading.Thread(target=self._serve, args=(device,), name="timed call", daemon=True)
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

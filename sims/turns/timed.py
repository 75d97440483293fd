"""Environments in this process with a time limit for each start and step: an environment that hangs loses its rollout,
but the run continues. Against crashes and excessive memory use see `mmrl.sims.turns.processes`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from mmrl.errors import UserError, describe_error
from mmrl.rollouts import Message, Prompt
from mmrl.runtime.timed_calls import TimedCalls, TimeLimit
from mmrl.sims.turns.dialogue import Fault
from mmrl.sims.turns.environment import Environment, Reply
from mmrl.sims.turns.settings import EnvironmentSettings

Value = TypeVar("Value")


class TimedEnvironments:
    """Makes environments and calls them, all in one thread, since a graphics context belongs to one thread."""

    def __init__(self, settings: EnvironmentSettings) -> None:
        key = f"task.{settings.title}"
        self._key, self._settings, self._calls = key, settings, TimedCalls(key, f"{key}.isolated: {{}}")
        self._any_made = False

    def make(self) -> Environment:
        """Returns a new environment. If it cannot be constructed: raises UserError for the first one, and later returns
        one that loses its rollout."""
        try:
            environment = self.call(lambda: self._settings.make())
        except UserError:
            raise
        except Exception as error:  # whatever a user's constructor raises
            problem = f"it cannot be constructed: {str(error) if isinstance(error, Fault) else describe_error(error)}"
            if not self._any_made:
                raise UserError(
                    f"{self._key}: {problem}; correct its __init__, or raise {self._key}.deadline_s if it needs longer"
                ) from error
            return UnmadeEnvironment(problem)
        self._any_made = True
        return TimedEnvironment(environment, self)

    def call(self, function: Callable[[], Value]) -> Value:
        """Returns the result of a function that calls an environment. Raises Fault if it exceeds the time limit."""
        limit = self._settings.deadline_s
        try:
            return self._calls(lambda _: function(), None, limit)
        except TimeLimit:
            raise Fault(f"no answer within task.{self._settings.title}.deadline_s={limit:g} s") from None


class UnmadeEnvironment(Environment):
    """Takes the place of an environment that could not be constructed: it raises Fault when it is started."""

    def __init__(self, problem: str) -> None:
        self._problem = problem

    def start(self, prompt: Prompt) -> Sequence[Message]:
        raise Fault(self._problem)

    def step(self, response: str) -> Reply:
        raise Fault(self._problem)


class TimedEnvironment(Environment):
    """An environment whose methods have a time limit. After the limit was exceeded it is not called again."""

    def __init__(self, environment: Environment, environments: TimedEnvironments) -> None:
        self._environment: Environment | None = environment
        self._environments = environments

    def start(self, prompt: Prompt) -> Sequence[Message]:
        return self._timed(lambda environment: environment.start(prompt))

    def step(self, response: str) -> Reply:
        return self._timed(lambda environment: environment.step(response))

    def tools(self) -> Sequence[dict[str, Any]]:
        return self._timed(lambda environment: environment.tools())

    def close(self) -> None:
        if self._environment is not None:
            self._timed(lambda environment: environment.close())

    def _timed(self, method: Callable[[Environment], Value]) -> Value:
        """Returns `method(environment)`. Raises Fault if it exceeds the time limit, and at every later call."""
        environment = self._environment
        if environment is None:
            raise Fault("it was not called again, since an earlier call exceeded deadline_s")
        try:
            return self._environments.call(lambda: method(environment))
        except Fault:
            self._environment = None
            raise

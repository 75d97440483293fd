"""Environments in worker processes, which are killed at a deadline. An environment that hangs, crashes or exceeds its
memory limit loses only its own rollout.

Workers are forked, as those of isolated rewards are (`mmrl.children.fork_server`). Each runs one conversation at a
time. Their answers are not trusted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from PIL import Image

from mmrl.children.fork_server import ForkedProcess, ForkServer
from mmrl.children.limits import Limits
from mmrl.errors import UserError, describe_error
from mmrl.rollouts import Message, Prompt, Video
from mmrl.runtime.images import to_rgb
from mmrl.sims.turns.dialogue import Fault, within
from mmrl.sims.turns.environment import Environment, Reply
from mmrl.sims.turns.settings import EnvironmentSettings, Isolation, TurnLimits

SERVICE = "mmrl.sims.turns.processes:serve"
CLOSE_S = 2.0  # time limit of close(), whose result is not needed
SPARE = 1 << 20  # bytes that an answer may have besides text and images


class Processes:
    """The worker processes of environments. They start on demand, are reused by later conversations, and end with this
    process. Raises UserError if the environment cannot be made in a worker."""

    def __init__(self, settings: EnvironmentSettings, isolation: Isolation) -> None:
        self.deadline_s = isolation.deadline_s
        self.key = f"task.{settings.title}"  # of the settings, for messages
        self.max_bytes = 8 * settings.limits.max_text + 4 * settings.limits.max_pixels + SPARE  # bytes of an answer
        self._fork_server = ForkServer(SERVICE, (settings,), isolation.limits or Limits(), (Message, Video))

    def make(self) -> Environment:
        return RemoteEnvironment(self)

    def acquire(self) -> ForkedProcess:
        """Returns an idle worker or starts one. Raises ConnectionError or UserError if it does not start."""
        try:
            return self._fork_server.acquire()
        except UserError as error:
            raise UserError(f"{self.key}: {error}") from None

    def close(self) -> None:
        self._fork_server.close()


class RemoteEnvironment(Environment):
    """An environment in a worker process. All of its errors are raised as Fault."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._worker: ForkedProcess | None = None
        self._tools: Sequence[dict[str, Any]] = ()

    def start(self, prompt: Prompt) -> Sequence[Message]:
        """Starts a conversation in the worker. Returns its first messages."""
        answer = self._call(("start", prompt))
        tools = _parsed(answer.get("tools"))
        self._tools = [tool for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
        return answer.get("messages", ())

    def step(self, response: str) -> Reply:
        """Returns the reply of the environment in the worker. Raises Fault if the worker fails, or its answer is not
        valid."""
        answer = self._call(("step", response))
        reward, facts = answer.get("reward"), _parsed(answer.get("facts"))
        if not isinstance(reward, int | float) or not isinstance(facts, dict):
            raise Fault("step() of the environment must give a number as reward and a mapping of facts")
        tool, error = (None if answer.get(key) is None else str(answer[key]) for key in ("tool", "error"))
        return Reply(answer.get("messages", ()), answer.get("end") is True, reward, tool, error, facts)

    def tools(self) -> Sequence[dict[str, Any]]:
        return self._tools

    def close(self) -> None:
        """Closes the environment in its worker, which is then free for another conversation. Raises Fault if that
        raises or hangs; a worker that hangs is killed."""
        worker, self._worker = self._worker, None
        if worker is None:
            return
        limit = min(CLOSE_S, self._processes.deadline_s)
        try:
            answer = worker.call(("close", None), limit)
        except TimeoutError:
            raise Fault(f"close() did not end in {limit:g} s") from None
        except ConnectionError as error:
            raise Fault(f"close(): {error}") from None
        worker.release()
        if "raised" in answer:
            raise Fault(f"close(): {answer['raised']}")

    def _call(self, request: tuple[str, Any]) -> dict[str, Any]:
        """Sends a request to the worker and returns its answer. Raises Fault if the environment raises, the worker
        ends, or there is no answer in time."""
        deadline = self._processes.deadline_s
        try:
            self._worker = self._worker or self._processes.acquire()
            answer = self._worker.call(request, deadline, self._processes.max_bytes)
        except (TimeoutError, ConnectionError) as error:
            self._worker = None
            timeout = f"no answer within {self._processes.key}.isolated.deadline_s={deadline:g} s"
            raise Fault(timeout if isinstance(error, TimeoutError) else str(error)) from None
        if "raised" in answer:
            raise Fault(str(answer["raised"]))
        return answer


def serve(settings: EnvironmentSettings) -> Callable[[tuple[str, Any]], dict[str, Any]]:
    """Returns the function that answers requests in a worker, which runs one conversation after another.

    A request is ("start", prompt), ("step", response) or ("close", None).
    """
    playing: list[Environment] = []  # the environment of the running conversation, if there is one

    def answer(request: tuple[str, Any]) -> dict[str, Any]:
        """Answers ("start", prompt) with the first messages and the tools, ("step", response) with the reply of the
        environment, ("close", None) with {}; or with "raised", the text of the environment's error. `playing` holds at
        most one environment."""
        try:
            if request[0] == "close":
                while playing:
                    playing.pop().close()
                return {}
            if request[0] == "start":
                playing.append(settings.make())
                messages = packed(playing[0].start(request[1]))
                return {"messages": messages, "tools": json.dumps(list(playing[0].tools()))}
            reply = playing[0].step(request[1])
            return {
                "messages": packed(reply.messages, settings.limits),
                "end": bool(reply.end),
                "reward": float(reply.reward),
                "tool": reply.tool,
                "error": reply.error,
                "facts": json.dumps(dict(reply.facts)),
            }
        except Fault as error:
            return {"raised": str(error)}
        except BaseException as error:  # whatever an environment raises, only its conversation is lost
            return {"raised": describe_error(error)}

    settings.make()  # so that an environment that cannot be made is reported before the run begins
    return answer


def packed(messages: Sequence[Message], limits: TurnLimits | None = None) -> list[Message]:
    """Converts the images of messages to RGB, before they are sent. Raises Fault if messages exceed the limits."""
    if limits is not None:
        within(messages, limits)
    return [replace(message, parts=tuple(map(_packed, message.parts))) for message in messages]


def _packed(part: str | Image.Image | Video) -> Any:
    """Returns a part of a message with its images converted to RGB."""
    if isinstance(part, Video):
        return replace(part, frames=tuple(map(_packed, part.frames)))
    return to_rgb(part) if isinstance(part, Image.Image) else part


def _parsed(text: Any) -> Any:
    """Parses JSON from a worker. Raises Fault if it is not JSON."""
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise Fault(f"the environment's process sent an invalid message ({error!r:.200})") from None

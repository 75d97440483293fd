"""Environments in processes of their own, which are killed at a deadline: one that hangs, ends its process or uses up
the machine's memory costs its own rollout.

They are forked as those of isolated rewards are (`mmrl.rewards.services.isolated`); each plays one conversation at a
time. Requests go out as pickles, which a worker may trust; answers come back as JSON with the plain bytes of pictures,
for nothing that comes from a worker is trusted.
"""

from __future__ import annotations

import atexit
import base64
import binascii
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from PIL import Image

from mmrl.errors import UserError, told
from mmrl.rewards.services.isolated import Nursery, RewardProcess
from mmrl.rewards.services.limits import Limits
from mmrl.rollouts import Message, Prompt, Video
from mmrl.sims.turns.dialogue import Fault, within
from mmrl.sims.turns.environment import Environment, Reply
from mmrl.sims.turns.settings import EnvironmentSettings, Isolation, TurnLimits

SERVICE = "mmrl.sims.turns.processes:serve"
SPARE = 1 << 20  # bytes of an answer beside text and pictures
LONGEST_SIDE = 1 << 16  # of a picture, in pixels


class Processes:
    """Workers for the environments of `settings`; they start when they are needed, stay for the next conversation, and
    end with this process. Raises UserError where the environment can not be made in a process of its own."""

    def __init__(self, settings: EnvironmentSettings, isolation: Isolation) -> None:
        self.settings, self.isolation = settings, isolation
        limits = settings.limits
        self.most = 8 * limits.max_text + 5 * limits.max_pixels + SPARE  # a pixel has 3 bytes, in base64 4
        self._nursery: Nursery | None = None
        self._idle: queue.LifoQueue[RewardProcess] = queue.LifoQueue()
        self._opening = threading.Lock()
        _LIVE.add(self)

    def make(self) -> Environment:
        return RemoteEnvironment(self)

    def hire(self) -> RewardProcess:
        """Raises ConnectionError, UserError."""
        nursery = self._opened()
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            return nursery.enlist()

    def release(self, worker: RewardProcess) -> None:
        if worker.spent:
            self.dismiss(worker)
        else:
            self._idle.put(worker)

    def dismiss(self, worker: RewardProcess) -> None:
        if self._nursery is not None:
            self._nursery.dismiss(worker)

    def close(self) -> None:
        with self._opening:
            if self._nursery is not None:
                self._nursery.close()
            self._nursery, self._idle = None, queue.LifoQueue()

    def _opened(self) -> Nursery:
        with self._opening:
            if self._nursery is None or self._nursery.process.poll() is not None:
                if self._nursery is not None:
                    self._nursery.close()
                self._idle = queue.LifoQueue()
                try:
                    self._nursery = Nursery(SERVICE, (self.settings,), self.isolation.limits or Limits())
                except UserError as error:
                    raise UserError(f"task.environment: {error}") from None
            return self._nursery


class RemoteEnvironment(Environment):
    """One that lives in a worker. Whatever goes wrong there is a Fault."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._worker: RewardProcess | None = None
        self._tools: Sequence[dict[str, Any]] = ()

    def start(self, prompt: Prompt) -> Sequence[Message]:
        answer = self._asked(("start", prompt))
        tools = answer.get("tools")
        self._tools = [tool for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
        return unpacked(answer.get("messages"))

    def step(self, response: str) -> Reply:
        answer = self._asked(("step", response))
        reward, facts = answer.get("reward"), answer.get("facts")
        if not isinstance(reward, int | float) or not isinstance(facts, dict):
            raise Fault("the environment answered nonsense")
        tool, error = (None if answer.get(key) is None else str(answer[key]) for key in ("tool", "error"))
        return Reply(unpacked(answer.get("messages")), answer.get("end") is True, reward, tool, error, facts)

    def tools(self) -> Sequence[dict[str, Any]]:
        return self._tools

    def close(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            self._processes.release(worker)

    def _asked(self, request: tuple[str, Any]) -> dict[str, Any]:
        deadline = self._processes.isolation.deadline_s
        try:
            if self._worker is None:
                self._worker = self._processes.hire()
            answer = self._worker.call(request, deadline, self._processes.most)
        except TimeoutError:
            why = f"no answer in {deadline:g} s; task.environment.isolated.deadline_s"
        except (ConnectionError, ValueError) as error:
            why = f"its process ended or answered nonsense ({' '.join(str(error).split())})"
        else:
            if "raised" in answer:
                raise Fault(str(answer["raised"]))
            return answer
        worker, self._worker = self._worker, None
        if worker is not None:
            self._processes.dismiss(worker)
        raise Fault(why)


def serve(settings: EnvironmentSettings) -> Callable[[tuple[str, Any]], dict[str, Any]]:
    """The service of a worker: one environment after the other, each from its start on."""
    playing: list[Environment] = []

    def answer(request: tuple[str, Any]) -> dict[str, Any]:
        try:
            if request[0] == "start":
                while playing:
                    playing.pop().close()
                playing.append(settings.make())
                return {"messages": packed(playing[0].start(request[1])), "tools": list(playing[0].tools())}
            reply = playing[0].step(request[1])
            return {
                "messages": packed(reply.messages, settings.limits),
                "end": bool(reply.end),
                "reward": float(reply.reward),
                "tool": reply.tool,
                "error": reply.error,
                "facts": dict(reply.facts),
            }
        except Fault as error:
            return {"raised": str(error)}
        except BaseException as error:  # any fault of an environment costs its conversation only
            return {"raised": told(error)}

    settings.make()  # what can not be made is said before a run begins
    return answer


def packed(messages: Sequence[Message], limits: TurnLimits | None = None) -> list[Any]:
    """As JSON. Raises Fault for what the limits do not allow: it would be long on its way."""
    if limits is not None:
        within(messages, limits)

    return [[message.role, [_packed(part) for part in message.parts]] for message in messages]


def _packed(part: str | Image.Image | Video) -> Any:
    if isinstance(part, Video):
        return {"fps": part.fps, "frames": [_bytes(frame) for frame in part.frames]}
    return part if isinstance(part, str) else _bytes(part)


def _bytes(picture: Image.Image) -> list[Any]:
    plain = picture.convert("RGB")
    return [plain.width, plain.height, base64.b64encode(plain.tobytes()).decode()]


def unpacked(found: Any) -> tuple[Message, ...]:
    """Raises Fault for what `packed` would not have made."""
    try:
        return tuple(Message(str(role), tuple(map(_part, parts))) for role, parts in found)
    except (TypeError, ValueError, KeyError, binascii.Error) as error:
        raise Fault(f"the environment answered nonsense ({error})") from None


def _part(found: Any) -> str | Image.Image | Video:
    if isinstance(found, str):
        return found
    if isinstance(found, dict):
        return Video(tuple(map(_picture, found["frames"])), float(found["fps"]))
    return _picture(found)


def _picture(found: Any) -> Image.Image:
    width, height, data = found
    if not (1 <= width <= LONGEST_SIDE and 1 <= height <= LONGEST_SIDE):
        raise ValueError("a picture without a size")
    return Image.frombytes("RGB", (int(width), int(height)), base64.b64decode(data, validate=True))


_LIVE: weakref.WeakSet[Processes] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for processes in list(_LIVE):
        processes.close()

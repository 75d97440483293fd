"""Environments of the package verifiers (0.1): its own loop plays them, with our policy in the place of a model."""

from __future__ import annotations

import asyncio
import json
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from functools import lru_cache
from typing import Any

from mmrl.errors import UserError, told
from mmrl.rollouts import Message, Prompt
from mmrl.settings import locate
from mmrl.sims.turns.chat import message
from mmrl.sims.turns.environment import Environment, Reply
from mmrl.sims.turns.games import FIRST_TRAINING_SEED, Verifiers
from mmrl.sims.turns.tools import ToolError, json_call


@lru_cache
def made(env: str | None, target: str | None, kwargs: str) -> Any:
    """Rollouts share an environment; what is of one rollout is in its state. Raises UserError."""
    try:
        import verifiers
        from verifiers import MultiTurnEnv  # noqa: F401 - later versions have none
    except ImportError as error:
        raise UserError(f"task.game.type=verifiers needs its package: pip install 'verifiers<0.2' ({error})") from None
    try:
        given = json.loads(kwargs)
        return locate(target, "task.game.target")(**given) if target else verifiers.load_environment(env, **given)
    except Exception as error:  # anybody's code
        raise UserError(f"task.game: {target or env} can not be made: {told(error)}") from None


def row(env: Any, seed: int) -> dict[str, Any]:
    """Of the environment's data: held-out rows for seeds below those of training."""
    held_out = seed < FIRST_TRAINING_SEED
    rows = env.get_eval_dataset() if held_out else env.get_dataset()
    return dict(rows[(seed if held_out else seed - FIRST_TRAINING_SEED) % len(rows)])


class VerifiersWorld(Environment):
    """A thread plays a rollout as the package does; where it would ask a model, it waits for a response of ours."""

    def __init__(self, settings: Verifiers) -> None:
        self.settings = settings
        self.env = made(settings.env, settings.target, json.dumps(settings.kwargs))
        self.asked: queue.Queue[Any] = queue.Queue()
        self.waiting: Future[str] | None = None
        self.seen: list[dict[str, Any]] = []  # messages
        self.schemas: Sequence[dict[str, Any]] = ()

    def start(self, prompt: Prompt) -> Sequence[Message]:
        threading.Thread(target=self._play, args=(row(self.env, prompt.metadata["seed"]),), daemon=True).start()
        found = self._next()
        if isinstance(found, Reply):
            raise ValueError("the environment ended before the first response")
        return found

    def tools(self) -> Sequence[dict[str, Any]]:
        return self.schemas

    def step(self, response: str) -> Reply:
        assert self.waiting is not None
        self.waiting.set_result(response)
        self.waiting = None
        found = self._next()
        return found if isinstance(found, Reply) else Reply(found)

    def close(self) -> None:
        if self.waiting is not None:
            self.waiting.cancel()

    def _next(self) -> Reply | tuple[Message, ...]:
        """Messages that are new to the policy, or the end."""
        kind, found = self.asked.get()
        if kind == "failed":
            raise found
        if kind == "ended":
            reward = float(found["reward"] or 0.0)
            facts = {"success": float(reward >= self.settings.won), **numbers(found.get("metrics") or {})}
            return Reply(end=True, reward=reward, facts=facts)
        prompt, tools, self.waiting = found
        written = [one.model_dump(exclude_none=True) for one in prompt]
        known = len(self.seen)
        if written[:known] != self.seen or (known and written[known]["role"] != "assistant"):
            raise ValueError("the environment rewrote what was said before; a conversation can only go on")
        self.seen = written
        self.schemas = [schema(tool) for tool in tools or ()]
        return tuple(message(one) for one in written[known + (1 if known else 0) :])

    def _play(self, given: dict[str, Any]) -> None:
        try:
            self.asked.put(("ended", asyncio.run(self._rollout(given))))
        except BaseException as error:  # told to whoever waits for it; a conversation that was closed has nobody
            self.asked.put(("failed", RuntimeError(told(error))))

    async def _rollout(self, given: dict[str, Any]) -> Any:
        state = await self.env.rollout(given, policy_client(self.asked), "policy", {})
        if state.get("error") is not None:
            raise RuntimeError(f"the environment failed: {state['error']!r}")
        await self.env.rubric.score_rollout(state)
        return state


def policy_client(asked: queue.Queue[Any]) -> Any:
    """What the package takes for a model: it puts what it is asked into `asked`, and waits."""
    from verifiers.clients import Client
    from verifiers.types import Response, ResponseMessage, ToolCall

    class PolicyClient(Client):  # type: ignore[misc]
        def setup_client(self, config: Any) -> None: ...

        async def to_native_tool(self, tool: Any) -> Any: ...

        async def to_native_prompt(self, messages: Any) -> Any: ...

        async def get_native_response(self, *given: Any, **more: Any) -> Any: ...

        async def raise_from_native_response(self, response: Any) -> None: ...

        async def from_native_response(self, response: Any) -> Any: ...

        async def close(self) -> None: ...

        async def get_response(self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **_: Any) -> Any:
            answer: Future[str] = Future()
            asked.put(("asked", (prompt, tools, answer)))
            text = await asyncio.wrap_future(answer)
            calls = [ToolCall(id="0", name=name, arguments=arguments) for name, arguments in called(text, tools)]
            why = "tool_calls" if calls else "stop"
            said = ResponseMessage(content=text, finish_reason=why, is_truncated=False, tool_calls=calls or None)
            return Response(id="0", created=0, model=model, message=said)

    return PolicyClient(None)


def called(text: str, tools: Any) -> list[tuple[str, str]]:
    """Name and JSON of the arguments of the call in a response, where the environment has tools."""
    try:
        call = json_call(text) if tools else None
    except ToolError:
        return []
    return [] if call is None else [(call.name, json.dumps(call.named))]


def schema(tool: Any) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def numbers(metrics: dict[str, Any]) -> dict[str, float]:
    return {f"metric/{name}": float(value) for name, value in metrics.items() if isinstance(value, int | float)}

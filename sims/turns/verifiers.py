"""Environments of the package verifiers (0.1): its own loop runs them, and the policy takes the place of its model."""

from __future__ import annotations

import asyncio
import json
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from functools import lru_cache
from typing import Any

from mmrl.errors import UserError, describe_error
from mmrl.rollouts import Message, Prompt
from mmrl.settings import locate
from mmrl.sims.turns.chat import message
from mmrl.sims.turns.environment import Environment, Reply
from mmrl.sims.turns.games import FIRST_TRAINING_SEED, Verifiers
from mmrl.sims.turns.tools import ToolError, json_call


@lru_cache
def load_env(env: str | None, target: str | None, kwargs: str) -> Any:
    """Loads an environment once; rollouts share it, since their states are separate. env: its id; target: a function
    that returns it, used instead of `env`; kwargs: arguments as JSON. Raises UserError if that fails."""
    try:
        import verifiers
        from verifiers import MultiTurnEnv  # noqa: F401 - later versions have none
    except ImportError as error:
        raise UserError(f"task.game.type=verifiers needs its package: pip install 'verifiers<0.2' ({error})") from None
    try:
        arguments = json.loads(kwargs)
        return (
            locate(target, "task.game.target")(**arguments) if target else verifiers.load_environment(env, **arguments)
        )
    except Exception as error:  # third-party code may raise anything
        raise UserError(f"task.game: {target or env} cannot be made: {describe_error(error)}") from None


def row(env: Any, seed: int) -> dict[str, Any]:
    """Returns the row of the environment's dataset for a seed. Seeds below FIRST_TRAINING_SEED are held-out rows."""
    held_out = seed < FIRST_TRAINING_SEED
    rows = env.get_eval_dataset() if held_out else env.get_dataset()
    return dict(rows[(seed if held_out else seed - FIRST_TRAINING_SEED) % len(rows)])


class VerifiersWorld(Environment):
    """An environment whose rollout runs in a thread by the package's own loop. Where that calls its model, it waits for
    a response of the policy."""

    def __init__(self, settings: Verifiers) -> None:
        self.settings = settings
        self.env = load_env(settings.env, settings.target, json.dumps(settings.kwargs))
        self.events: queue.Queue[Any] = queue.Queue()
        self.waiting: Future[str] | None = None
        self.messages: list[dict[str, Any]] = []  # all messages of the conversation so far
        self.schemas: Sequence[dict[str, Any]] = ()

    def start(self, prompt: Prompt) -> Sequence[Message]:
        """Starts the rollout of the row of the prompt's seed in a thread. Returns the first messages."""
        threading.Thread(target=self._play, args=(row(self.env, prompt.metadata["seed"]),), daemon=True).start()
        reply = self._next()
        if isinstance(reply, Reply):
            raise ValueError("the environment ended before the first response")
        return reply

    def tools(self) -> Sequence[dict[str, Any]]:
        return self.schemas

    def step(self, response: str) -> Reply:
        """Passes a response to the package's loop, which waits for it, and returns its next messages or its end."""
        assert self.waiting is not None
        self.waiting.set_result(response)
        self.waiting = None
        reply = self._next()
        return reply if isinstance(reply, Reply) else Reply(reply)

    def close(self) -> None:
        if self.waiting is not None:
            self.waiting.cancel()

    def _next(self) -> Reply | tuple[Message, ...]:
        """Waits for the environment. Returns its new messages, or the reply that ends the conversation."""
        kind, content = self.events.get()
        if kind == "failed":
            raise content
        if kind == "ended":
            reward = float(content["reward"] or 0.0)
            facts = {"success": float(reward >= self.settings.won), **numbers(content.get("metrics") or {})}
            return Reply(end=True, reward=reward, facts=facts)
        prompt, tools, self.waiting = content
        written = [entry.model_dump(exclude_none=True) for entry in prompt]
        count = len(self.messages)
        if written[:count] != self.messages or (count and written[count]["role"] != "assistant"):
            raise ValueError("the environment changed earlier messages of the conversation, but may only add new ones")
        self.messages = written
        self.schemas = [schema(tool) for tool in tools or ()]
        first_new = count + 1 if count else 0  # after the earlier messages comes the policy's own response
        return tuple(message(entry) for entry in written[first_new:])

    def _play(self, row: dict[str, Any]) -> None:
        """Runs the rollout of a dataset row and puts its result, or its error, into `events`."""
        try:
            self.events.put(("ended", asyncio.run(self._rollout(row))))
        except BaseException as error:  # raised in the thread that waits for it, if any
            self.events.put(("failed", RuntimeError(describe_error(error))))

    async def _rollout(self, row: dict[str, Any]) -> dict[str, Any]:
        """Runs the package's rollout and its rubric. Returns the final state, with reward and metrics."""
        state = await self.env.rollout(row, policy_client(self.events), "policy", {})
        if state.get("error") is not None:
            raise RuntimeError(f"the environment failed: {state['error']!r}")
        await self.env.rubric.score_rollout(state)
        return state


def policy_client(events: queue.Queue[Any]) -> object:
    """Returns a replacement of the package's model client: it puts prompts into `events` and awaits the policy's
    responses."""
    from verifiers.clients import Client
    from verifiers.types import Response, ResponseMessage, ToolCall

    class PolicyClient(Client):  # type: ignore[misc]
        # Abstract methods of Client, which have nothing to do since `get_response` is replaced.
        def setup_client(self, config: object) -> None: ...

        async def to_native_tool(self, tool: object) -> None: ...

        async def to_native_prompt(self, messages: object) -> None: ...

        async def get_native_response(self, *args: object, **kwargs: object) -> None: ...

        async def raise_from_native_response(self, response: object) -> None: ...

        async def from_native_response(self, response: object) -> None: ...

        async def close(self) -> None: ...

        async def get_response(
            self, prompt: object, model: str, sampling_args: object, tools: object = None, **_: object
        ) -> object:
            """Puts the prompt into `events`, and awaits the policy's response to it. Returns the response in the
            package's format."""
            answer: Future[str] = Future()
            events.put(("prompt", (prompt, tools, answer)))
            text = await asyncio.wrap_future(answer)
            calls = [ToolCall(id="0", name=name, arguments=arguments) for name, arguments in called(text, tools)]
            why = "tool_calls" if calls else "stop"
            response_message = ResponseMessage(
                content=text, finish_reason=why, is_truncated=False, tool_calls=calls or None
            )
            return Response(id="0", created=0, model=model, message=response_message)

    return PolicyClient(None)


def called(text: str, tools: object) -> list[tuple[str, str]]:
    """Returns name and JSON arguments of the tool call in a response; [] if there is none or the environment has no
    tools."""
    try:
        call = json_call(text) if tools else None
    except ToolError:
        return []
    return [] if call is None else [(call.name, json.dumps(call.named))]


def schema(tool: Any) -> dict[str, Any]:
    """Returns the JSON schema of a tool of the package, in the format of chat templates."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """Returns the numeric metrics of a rubric as facts "metric/NAME"."""
    return {f"metric/{name}": float(value) for name, value in metrics.items() if isinstance(value, int | float)}

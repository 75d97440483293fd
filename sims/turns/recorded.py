"""Replay of recorded conversations: the recorded observations follow, whatever the policy responds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mmrl.rollouts import Message, Prompt
from mmrl.sims.turns.environment import Environment, Reply


class RecordedEnvironment(Environment):
    """An environment that replies with the next of `observations` in the prompt's metadata, and ends after the last
    one."""

    def start(self, prompt: Prompt) -> Sequence[Message]:
        self._left = list(prompt.metadata.get("observations", ()))
        self._tools = prompt.tools
        return prompt.messages

    def step(self, response: str) -> Reply:
        return Reply(self._left.pop(0)) if self._left else Reply(end=True)

    def tools(self) -> Sequence[dict[str, Any]]:
        return self._tools

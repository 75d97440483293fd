"""Conversations that were held before: what the policy says, its prompt's recorded observations come back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mmrl.rollouts import Message, Prompt
from mmrl.sims.turns.environment import Environment, Reply


class RecordedEnvironment(Environment):
    """Answers response by response with `observations` of the prompt's metadata, and ends after the last of them."""

    def start(self, prompt: Prompt) -> Sequence[Message]:
        self._left = list(prompt.metadata.get("observations", ()))
        self._tools = prompt.tools
        return prompt.messages

    def step(self, response: str) -> Reply:
        return Reply(self._left.pop(0)) if self._left else Reply(end=True)

    def tools(self) -> Sequence[dict[str, Any]]:
        return self._tools

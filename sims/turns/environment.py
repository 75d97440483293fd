"""The interface of multi-turn environments. A class of your own inherits from `Environment`; its settings, which make
it, inherit from `mmrl.sims.turns.settings:EnvironmentSettings`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mmrl.rollouts import Message, Prompt


@dataclass(frozen=True)
class Reply:
    """An environment's reply to a response: messages to which the policy responds next, or the end.

    reward: the reward of this turn alone. tool: the name of the tool that the response called. error: why the response
    could not be executed; the messages should tell the policy too. facts: further information for rewards, metrics and
    tables: numbers, text, lists and dicts by name.
    """

    messages: Sequence[Message] = ()
    end: bool = False
    reward: float = 0.0
    tool: str | None = None
    error: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


class Environment(ABC):
    """The environment of one conversation. What it does must depend only on the prompt and the responses, so that
    rollouts are reproducible; random numbers must come from a seed in the prompt."""

    @abstractmethod
    def start(self, prompt: Prompt) -> Sequence[Message]:
        """Returns the first messages of the conversation."""

    @abstractmethod
    def step(self, response: str) -> Reply:
        """Plays one turn: takes a response of the policy and returns the reply to it."""

    def tools(self) -> Sequence[dict[str, Any]]:
        """Returns the JSON schemas of tools for the chat template."""
        return ()

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Frees the environment's resources. It is called once, after the conversation."""

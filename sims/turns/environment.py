"""The interface of environments of turns. One's own inherits from `Environment`; its settings, which make it, from
`mmrl.sims.turns.settings:EnvironmentSettings`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mmrl.rollouts import Message, Prompt


@dataclass(frozen=True)
class Reply:
    """An environment's reply to a response: messages, to which the policy responds next, or the end.

    reward: of this turn. tool: name of the tool that the response called. error: why the response could not be carried
    out; the messages should say so too. facts: for rewards, metrics and tables; numbers, text, lists and dicts.
    """

    messages: Sequence[Message] = ()
    end: bool = False
    reward: float = 0.0
    tool: str | None = None
    error: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


class Environment(ABC):
    """The environment of one conversation. It must be a function of the prompt and the responses alone, so that
    rollouts are reproducible: random numbers come from a seed in the prompt."""

    @abstractmethod
    def start(self, prompt: Prompt) -> Sequence[Message]:
        """Returns the first messages of the conversation."""

    @abstractmethod
    def step(self, response: str) -> Reply: ...

    def tools(self) -> Sequence[dict[str, Any]]:
        """Returns the JSON schemas of functions that the chat template shows the policy."""
        return ()

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Frees what the environment holds. Called once, when the conversation has ended."""

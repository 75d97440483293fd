"""What an environment of turns is. One of one's own inherits from `Environment`; its settings, which make it, from
`mmrl.sims.turns.settings:EnvironmentSettings`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mmrl.rollouts import Message, Prompt


@dataclass(frozen=True)
class Reply:
    """What an environment answers to a response: messages, to which the policy responds next, or its end.

    reward: of this turn. tool: that the response called. error: why what the response asked for could not be done; the
    messages should say so too. facts: for rewards, metrics and tables; numbers, text, lists and dicts.
    """

    messages: Sequence[Message] = ()
    end: bool = False
    reward: float = 0.0
    tool: str | None = None
    error: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


class Environment(ABC):
    """The other side of one conversation. What it does must follow from the prompt and the responses alone, so that
    the same rollout comes again: what it draws by chance, it draws from a seed in the prompt."""

    @abstractmethod
    def start(self, prompt: Prompt) -> Sequence[Message]:
        """What the policy reads first."""

    @abstractmethod
    def step(self, response: str) -> Reply: ...

    def tools(self) -> Sequence[dict[str, Any]]:
        """JSON schemas of functions that the chat template shows the policy."""
        return ()

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Called once, when the conversation is over."""

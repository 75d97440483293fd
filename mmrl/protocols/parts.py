"""What the training loop asks of its parts, whatever they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from mmrl.rollouts import Prompt, Replay, Rollouts, Sample


class Source(Protocol):
    """Prompts by index: the same index gives the same prompt."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Prompt: ...


@runtime_checkable
class ExactSource(Source, Protocol):
    """A source that may give another prompt in the place of one that can not be used."""

    def read(self, index: int) -> Prompt:
        """`self[index]`, or any error where that is not the prompt of this very place."""


@runtime_checkable
class ReadableSource(ExactSource, Protocol):
    """A source that other processes can read as well, to which it is pickled. readers: how many of them read ahead."""

    @property
    def readers(self) -> int: ...


class Responding(Protocol):
    """What answers prompts."""

    def respond(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Sample]: ...

    def counts(self) -> dict[str, float]:
        """Of what went wrong since it was last asked."""


@runtime_checkable
class RolloutSource(Responding, Protocol):
    """What makes rollouts."""

    def rollout(self, prompts: Sequence[Prompt], group_size: int, seeds: Sequence[int], *, step: int) -> Rollouts: ...


class Policy(RolloutSource, Protocol):
    """A model that makes rollouts and says how likely they are."""

    @property
    def module(self) -> nn.Module: ...

    @property
    def max_decisions(self) -> int:
        """Of the longest rollout."""

    def demonstrate(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> Rollouts: ...

    def replay(self, rollouts: Rollouts, model: Any, *, reference: bool = False) -> Replay:
        """model: `module`, or the engine around it. reference: its weights are those of the reference policy now."""

    def view(self, rollouts: Rollouts, change: Callable[[Prompt], Prompt]) -> Rollouts:
        """The same rollouts as answers to changed prompts."""

    def trained_by(self, engine: Any) -> None:
        """Told once which engine trains it, whose ranks it may have to keep step with."""

    def save(self, folder: Path, state: dict[str, Tensor]) -> None: ...


class Drafting(Policy, Protocol):
    """A policy whose rollouts can be made bit by bit."""

    engine: Any
    eos: tuple[int, ...]

    def draft(self, prompts: Sequence[Prompt], group_size: int, seeds: Sequence[int]) -> list[Any]: ...

    def extend(self, generator: Any, drafts: Sequence[Any], count: int) -> None: ...

    def restore(self, drafts: Sequence[Any], states: Sequence[dict[str, Any]]) -> None:
        """Makes new drafts those that once had these states."""

    def complete(self, drafts: Sequence[Any], group_size: int) -> Rollouts: ...


class Task(Protocol):
    """Prompts, what a rollout earns, and what counts as success. train: None where it can only be evaluated."""

    @property
    def train(self) -> Source | None: ...

    @property
    def evaluation(self) -> Source: ...

    @property
    def reward_names(self) -> Sequence[str]: ...

    @property
    def reward_weights(self) -> Sequence[float]: ...

    def score(self, samples: Sequence[Sample], group: Tensor) -> Tensor: ...

    def accuracy(self, samples: Sequence[Sample]) -> Tensor: ...

    def measures(self, samples: Sequence[Sample], group: Tensor) -> dict[str, Tensor]: ...


class PromptReader(Protocol):
    """What may have encoded prompts already."""

    def encoded(self, prompt: Prompt) -> Any | None:
        """What an `Encoding` policy's encoder made of this very prompt, once; None: nobody has."""


@runtime_checkable
class Encoding(Protocol):
    """A policy that makes something of a prompt before it answers it, which can be done in another process."""

    def read_by(self, reader: PromptReader) -> None:
        """Told once who reads ahead and may have encoded a prompt already."""

    def encoder(self) -> Callable[[Prompt], Any] | None:
        """Can be pickled. None: what it would make is of no use here."""


@runtime_checkable
class SimulatedTask(Protocol):
    """A task whose prompts are start states of episodes."""

    simulator_rows: int  # environments that may exist at once on a rank
    watched: bool  # whether what is measured or earned depends on images of whole episodes

    def make_simulator(self, rows: int) -> Any: ...


@runtime_checkable
class ConversationTask(Protocol):
    """A task in which an environment answers responses."""

    environment: Any  # settings of `mmrl.sims.turns.settings:EnvironmentSettings`; None: it asks for one response


class SyncedGenerator(Protocol):
    """Engines that generate for the policy and need its weights. Inside `generation`, and after `synchronise`, they
    have them; both give metrics."""

    def generation(self) -> AbstractContextManager[dict[str, float]]: ...

    def synchronise(self) -> dict[str, float]: ...

    def close(self) -> None: ...

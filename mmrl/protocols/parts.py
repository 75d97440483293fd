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

    reader: PromptReader | None

    def encoder(self) -> Callable[[Prompt], Any] | None:
        """Can be pickled. None: what it would make is of no use here."""


@runtime_checkable
class Numbered(Protocol):
    """A policy whose decisions are numbers of a list."""

    def numbers(self, rollouts: Rollouts) -> Tensor:
        """[rollout, decision] int64."""


@runtime_checkable
class Storing(Protocol):
    """A policy whose rollouts can be put away and made again."""

    def stored(self, rollouts: Rollouts) -> list[dict[str, Any]]:
        """Of each rollout the numbers, texts and lists from which `recalled` makes it again."""

    def recalled(self, prompts: Sequence[Prompt], states: Sequence[dict[str, Any]]) -> Rollouts:
        """Rollouts of these prompts, not scored, as they were put away."""


@runtime_checkable
class Recombining(Protocol):
    """A policy whose responses can be put together."""

    def recombined(self, first: Rollouts, second: Rollouts, text: str) -> Rollouts:
        """Responses that are one of `first`, the text, and one of `second`, which alone counts; not scored."""


@runtime_checkable
class Continuing(Protocol):
    """A policy whose responses can go on anew from inside."""

    def continued(self, rollouts: Rollouts, lengths: Sequence[int], seeds: Sequence[int]) -> Rollouts:
        """Of each rollout the first so many decisions, and what the policy decides after them now; not scored."""


@runtime_checkable
class Completing(Protocol):
    """A policy whose decisions are steps of chains."""

    def complete_steps(self, rollouts: Rollouts, *, ends: bool = False) -> list[Sample]:
        """What the states before each decision lead to without further noise, with `ends` those behind it: all of the
        first rollout, then of the next."""


@runtime_checkable
class Inverting(Protocol):
    """A policy that can read what it makes."""

    def inverse(self, rollouts: Rollouts) -> Tensor:
        """[rollout] how likely it finds each prompt, given what was made of it: a mean over the prompt's tokens."""


@runtime_checkable
class Recording(Protocol):
    """A policy that may keep what it said of rollouts when it made them."""

    def recorded(self, rollouts: Rollouts) -> Replay | None:
        """What a replay by the weights that made them says, to rounding, without a pass of the network; None where it
        was not kept, on all ranks alike."""


@runtime_checkable
class Latent(Protocol):
    """A policy whose decisions are made from latents."""

    def latents(self, rollouts: Rollouts) -> Tensor:
        """[rollout, decision, number]: what a small network can read of the state before each decision."""


@runtime_checkable
class Uneven(Protocol):
    """A policy whose rollouts differ in what it costs to learn from them."""

    def lengths(self, rollouts: Rollouts) -> Tensor:
        """[rollout] int64, to which that cost is about proportional."""


@runtime_checkable
class Stepwise(Protocol):
    """A policy whose rollouts are episodes of steps that can be replayed one by one."""

    def by_step(self, rollouts: Rollouts) -> Rollouts:
        """Every step as a rollout of its own."""


@runtime_checkable
class SimulatedTask(Protocol):
    """A task whose prompts are start states of episodes."""

    simulator_rows: int  # environments that may exist at once on a rank
    watched: bool  # whether what is measured or earned depends on pictures of whole episodes

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

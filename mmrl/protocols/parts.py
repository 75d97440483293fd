"""Protocols of the parts of the training loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from mmrl.errors import UserError
from mmrl.rollouts import Prompt, Replay, Rollouts, Sample

PromptCheck = Callable[[Prompt], str | None]  # why a prompt cannot be read, in one line; None: it can


class Source(Protocol):
    """Prompts by index: the same index gives the same prompt."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Prompt: ...


@runtime_checkable
class ExactSource(Source, Protocol):
    """A source that may return another prompt for an index whose prompt can not be used."""

    def read(self, index: int) -> Prompt:
        """Returns `self[index]`; raises any error where that would be another prompt than that of the index."""


@runtime_checkable
class ReadableSource(ExactSource, Protocol):
    """A source that can be pickled and read in other processes. readers: number of processes that read ahead."""

    @property
    def readers(self) -> int: ...


class Responding(Protocol):
    """A sampler of one response a prompt."""

    def respond(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Sample]: ...

    def counts(self) -> dict[str, float]:
        """Returns counts of failures since the last call, by metric name."""


@runtime_checkable
class RolloutSource(Responding, Protocol):
    """A sampler of groups of rollouts."""

    def rollout(self, prompts: Sequence[Prompt], group_size: int, seeds: Sequence[int], *, step: int) -> Rollouts: ...


class Policy(RolloutSource, Protocol):
    """A model that samples rollouts and computes their log-probabilities."""

    @property
    def module(self) -> nn.Module: ...

    @property
    def max_decisions(self) -> int:
        """Returns the number of decisions of the longest rollout."""

    def demonstrate(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> Rollouts: ...

    def replay(self, rollouts: Rollouts, model: Any, *, reference: bool = False) -> Replay:
        """Recomputes the rollouts' log-probabilities. model: `module`, or the engine around it. reference: the module
        holds the reference policy's weights during this call."""

    def view(self, rollouts: Rollouts, change: Callable[[Prompt], Prompt]) -> Rollouts:
        """Returns the same rollouts with changed prompts."""

    def set_engine(self, engine: Any) -> None:
        """Receives the engine that trains the policy, once, before the first rollout; some policies have to stay in
        step with its ranks."""

    def save(self, folder: Path, state: dict[str, Tensor]) -> None: ...


class Drafting(Policy, Protocol):
    """A policy whose rollouts can be generated over several calls."""

    engine: Any
    eos: tuple[int, ...]

    def draft(self, prompts: Sequence[Prompt], group_size: int, seeds: Sequence[int]) -> list[Any]: ...

    def extend(self, generator: Any, drafts: Sequence[Any], count: int) -> None: ...

    def restore(self, drafts: Sequence[Any], states: Sequence[dict[str, Any]]) -> None:
        """Restores the states of earlier drafts in new ones."""

    def complete(self, drafts: Sequence[Any], group_size: int) -> Rollouts: ...


class Task(Protocol):
    """A task: prompts, rewards and a measure of success. train: None where it can only be evaluated."""

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


@runtime_checkable
class TaskWithDemonstrations(Protocol):
    """A task whose demonstrations are not answers to the prompts that it asks, as an expert's observations are not the
    start states of episodes. demonstrations: None where there are none."""

    @property
    def demonstrations(self) -> Source | None: ...


def get_demonstrations(task: Task, prompts: Source) -> Source:
    """Returns the demonstrations of a task, which are answers to its `prompts` where it has no others. Raises UserError
    for a task that could have some and has none."""
    if not isinstance(task, TaskWithDemonstrations):
        return prompts
    if task.demonstrations is None:
        raise UserError("learning from demonstrations needs task.demonstrations, such as {type: expert}")
    return task.demonstrations


class PromptReader(Protocol):
    """A reader that may have encoded prompts ahead of time."""

    def encoded(self, prompt: Prompt) -> Any | None:
        """Returns the output of an `Encoding` policy's encoder for this prompt object, once; None where it was not
        encoded ahead of time."""


@runtime_checkable
class Encoding(Protocol):
    """A policy whose prompts can be encoded in another process."""

    def set_prompt_reader(self, reader: PromptReader) -> None:
        """Receives the reader that may have encoded prompts ahead of time, once."""

    def encoder(self) -> Callable[[Prompt], Any] | None:
        """Returns the encoder, which can be pickled; None where encoding ahead of time is of no use."""


@runtime_checkable
class FittingPolicy(Protocol):
    """A policy that knows which prompts it cannot read. prompt_problem: the check of one, which can be pickled."""

    @property
    def prompt_problem(self) -> PromptCheck: ...


@runtime_checkable
class FittedSource(Source, Protocol):
    """A source of rows that leaves out those whose prompts do not fit the policy. name: of its file; max_bad_share: of
    its rows that may be left out."""

    @property
    def name(self) -> str: ...

    @property
    def max_bad_share(self) -> float: ...

    def fit(self, prompt_problem: PromptCheck) -> None:
        """Takes the check, before prompts are read."""

    def fits(self, index: int) -> bool:
        """Returns whether the row at an index can be used; if not, it is named and left out. Raises UserError beyond
        `max_bad_share`."""


@runtime_checkable
class ExplainingTask(Protocol):
    """A task that knows why its rewards did not score a rollout."""

    def unscored_reasons(self) -> Mapping[str, str]:
        """The reasons by reward."""


class RewardStates(Protocol):
    def state(self) -> dict[str, Any]:
        """Returns what rewards have learned or counted on this rank, by name; empty where none has a state."""

    def load(self, states: Mapping[str, Any], /) -> None: ...


@runtime_checkable
class RewardingTask(Protocol):
    """A task whose rewards may have a state, which checkpoints keep."""

    rewards: RewardStates


@runtime_checkable
class ResizedTask(Protocol):
    """A task whose rewards may speak of what the model's image processor makes of an image."""

    def use_resize(self, resize: Mapping[str, int] | None) -> None:
        """Takes factor, min_pixels and max_pixels of the processor; None: it resizes in another way."""


@runtime_checkable
class Resizing(Protocol):
    """A policy whose processor resizes images. image_resize: factor, min_pixels and max_pixels; None: in another way
    than Qwen2-VL's."""

    image_resize: Mapping[str, int] | None


@runtime_checkable
class SimulatedTask(Protocol):
    """A task whose prompts are start states of episodes."""

    simulator_rows: int  # environments that may exist at once on a rank
    watched: bool  # whether rewards or metrics depend on images of whole episodes

    def make_simulator(self, rows: int) -> Any: ...


@runtime_checkable
class ConversationTask(Protocol):
    """A task in which an environment answers responses."""

    environment: Any  # settings of `mmrl.sims.turns.settings:EnvironmentSettings`; None: a single response


class SyncedGenerator(Protocol):
    """Engines that generate for the policy and need its weights. They have them inside the context `generation` and
    after `sync_weights`; both return metrics."""

    def generation(self) -> AbstractContextManager[dict[str, float]]: ...

    def sync_weights(self) -> dict[str, float]: ...

    def close(self) -> None: ...

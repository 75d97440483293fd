"""Interfaces of the parts that the training loop connects: task, policy, generator and sources of prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor, nn

from mmrl.errors import UserError
from mmrl.rollouts import Prompt, Replay, Rollouts, Sample

PromptCheck = Callable[[Prompt], str | None]  # returns why the policy cannot read a prompt, in one line; None: it can
# What sources of rollout.extras make. demonstrations: known answers; replayed: rollouts or steps of earlier training
# steps; proposals: actions that are not executed; other: rollouts of this training step.
RolloutKind = Literal["demonstrations", "replayed", "large_advantages", "proposals", "other"]


class Source(Protocol):
    """A data set of prompts. The same index always gives the same prompt."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Prompt: ...


@runtime_checkable
class ExactSource(Source, Protocol):
    """A source whose `__getitem__` returns another prompt where that of an index cannot be used."""

    def read(self, index: int) -> Prompt:
        """Returns the prompt of this index itself. Raises where it cannot be used."""


@runtime_checkable
class ReadableSource(ExactSource, Protocol):
    """A source that can be pickled and read in other processes."""

    @property
    def readers(self) -> int:
        """Returns the number of processes that read prompts ahead of time."""


class Responding(Protocol):
    """A policy or worker that answers prompts with one response each, for evaluation."""

    def respond(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Sample]:
        """Samples one response to each prompt; a seed for each."""

    def counts(self) -> dict[str, float]:
        """Returns counts of failures since the last call, by metric name."""


@runtime_checkable
class RolloutSource(Responding, Protocol):
    """A sampler of groups of rollouts: the policy, or workers in its place."""

    def rollout(self, prompts: Sequence[Prompt], group_size: int, seeds: Sequence[int], *, step: int) -> Rollouts:
        """Samples `group_size` rollouts for each prompt, without rewards. seeds: one for each rollout. step: number of
        finished training steps."""


class Policy(RolloutSource, Protocol):
    """A model that samples rollouts and computes their log-probabilities."""

    @property
    def module(self) -> nn.Module: ...

    @property
    def max_decisions(self) -> int:
        """Returns the number of decisions of the longest rollout."""

    def demonstrate(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> Rollouts:
        """Builds a rollout from the known answer of each prompt, for supervised losses."""

    def replay(self, rollouts: Rollouts, model: Any, *, reference: bool = False) -> Replay:
        """Recomputes the rollouts' log-probabilities. model: `module`, or the engine around it (for gradients).
        reference: whether the module holds the reference policy's weights during this call."""

    def view(self, rollouts: Rollouts, change: Callable[[Prompt], Prompt]) -> Rollouts:
        """Returns the same responses as rollouts of changed prompts, such as prompts with a masked image."""

    def set_engine(self, engine: Any) -> None:
        """Receives the engine that trains the policy, once, before the first rollout. Policies that must generate on
        all ranks together use its collectives."""

    def save(self, folder: Path, state: dict[str, Tensor]) -> None:
        """Writes the weights `state` to a folder in the format of the model's library."""


class Drafting(Policy, Protocol):
    """A policy whose responses can be generated over several calls, as unfinished responses (drafts).

    engine: what generates tokens. eos: ids of the tokens that end a response.
    """

    engine: Any
    eos: tuple[int, ...]

    def draft(self, prompts: Sequence[Prompt], group_size: int, seeds: Sequence[int]) -> list[Any]:
        """Returns `group_size` empty drafts for each prompt."""

    def extend(self, generator: Any, drafts: Sequence[Any], count: int) -> None:
        """Generates up to `count` more tokens for each unfinished draft, in place. generator: `engine`."""

    def restore(self, drafts: Sequence[Any], states: Sequence[dict[str, Any]]) -> None:
        """Sets new drafts to the saved states of earlier ones."""

    def complete(self, drafts: Sequence[Any], group_size: int) -> Rollouts:
        """Returns finished drafts as rollouts, without rewards."""


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

    def score(self, samples: Sequence[Sample], group: Tensor) -> Tensor:
        """Returns the rewards, [sample, component] float32; NaN where a component could not be computed. group:
        [sample] int64, equal for samples of the same prompt."""

    def accuracy(self, samples: Sequence[Sample]) -> Tensor:
        """Returns the measure of success, [sample] float32; NaN where it is unknown."""

    def measures(self, samples: Sequence[Sample], group: Tensor) -> dict[str, Tensor]:
        """Returns further quantities of the samples for the log, by metric name, [sample] each."""


@runtime_checkable
class TaskWithDemonstrations(Protocol):
    """A task whose demonstrations are a data set of their own, not answers to its prompts. A robot's prompts are start
    states of episodes, for example, while its demonstrations are observations with an expert's actions."""

    @property
    def demonstrations(self) -> Source | None:
        """Returns the demonstrations; None where the configuration names none."""


def get_demonstrations(task: Task, prompts: Source) -> Source:
    """Returns the demonstrations of a task: its data set of demonstrations, or, of a task whose prompts hold their
    answers, `prompts`. Raises UserError where the task needs task.demonstrations and the configuration has none."""
    if not isinstance(task, TaskWithDemonstrations):
        return prompts
    if task.demonstrations is None:
        raise UserError("learning from demonstrations needs task.demonstrations, such as {type: expert}")
    return task.demonstrations


class PromptReader(Protocol):
    """A reader of prompts that may have encoded them for the policy ahead of time, in other processes."""

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
    """A policy that cannot read every prompt, for example because one is too long. prompt_problem: the check of a
    prompt; it can be pickled."""

    @property
    def prompt_problem(self) -> PromptCheck: ...


@runtime_checkable
class FittedSource(Source, Protocol):
    """A data set that skips rows whose prompts the policy cannot read. name: that of its file. max_bad_share: largest
    share of rows that may be skipped."""

    @property
    def name(self) -> str: ...

    @property
    def max_bad_share(self) -> float: ...

    def fit(self, prompt_problem: PromptCheck) -> None:
        """Receives the policy's check, before prompts are read."""

    def fits(self, index: int) -> bool:
        """Returns whether the row at an index can be used; if not, logs why and skips it from now on. Raises UserError
        where more than `max_bad_share` of the rows are skipped."""


@runtime_checkable
class ExplainingTask(Protocol):
    """A task that knows why its rewards did not score a rollout."""

    def unscored_reasons(self) -> Mapping[str, str]:
        """Returns the reason for each reward that did not score some rollout."""


class RewardStates(Protocol):
    """The rewards of a task, some of which may have a state, such as running statistics."""

    def state(self) -> dict[str, Any]:
        """Returns the states on this rank by reward name; empty where no reward has one."""

    def load(self, states: Mapping[str, Any], /) -> None:
        """Restores what `state` returned."""


@runtime_checkable
class RewardingTask(Protocol):
    """A task whose rewards may have a state, which checkpoints keep."""

    rewards: RewardStates


@runtime_checkable
class ResizedTask(Protocol):
    """A task whose answers hold pixel coordinates, which are those of the image after the model's processor has resized
    it."""

    def use_resize(self, resize: Mapping[str, int] | None) -> None:
        """Receives the processor's resize options factor, min_pixels and max_pixels (as of Qwen2-VL); None: it resizes
        in another way."""


@runtime_checkable
class Resizing(Protocol):
    """A policy whose processor resizes images. image_resize: the options factor, min_pixels and max_pixels of
    Qwen2-VL's processor; None: it resizes in another way."""

    image_resize: Mapping[str, int] | None


@runtime_checkable
class SimulatedTask(Protocol):
    """A task whose prompts are start states of episodes in a simulator."""

    simulator_rows: int  # largest number of parallel environments on a rank
    watched: bool  # whether rewards or metrics read the frames of whole episodes (`Episode.frames`)

    def make_simulator(self, rows: int) -> Any:
        """Builds a vectorized simulator of `rows` parallel environments."""


@runtime_checkable
class ConversationTask(Protocol):
    """A task in which an environment answers responses."""

    environment: Any  # settings of `mmrl.sims.turns.settings:EnvironmentSettings`; None: a single response


class SyncedGenerator(Protocol):
    """Engines or workers that generate in place of the policy, with copies of its weights. Both methods that send the
    current weights return metrics."""

    def generation(self) -> AbstractContextManager[dict[str, float]]:
        """Returns a context in which the copies are the current weights."""

    def sync_weights(self) -> dict[str, float]:
        """Sends the current weights. A collective."""

    def close(self) -> None: ...

"""Measurements: quantities of a step's rollouts beyond rewards and log-probabilities, computed for the methods that
need them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Protocol, TypeVar

from mmrl.protocols.offers import Offer

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.auxiliary import AuxiliaryModules
    from mmrl.protocols.parts import RolloutSource, Task
    from mmrl.rollouts import Prompt, Rollouts, Sample

R_co = TypeVar("R_co", covariant=True)  # a record; for a ReplayedMeasurement any type
Weights = Literal["sampling", "reference"]  # those that sampled the step's rollouts, or the reference policy's


@dataclass(frozen=True)
class MeasurementContext:
    """Inputs of a measurement. policy: has every ability that the measurement requires. seed: the run's seed. step:
    number of finished steps. group_size: rollouts per prompt. max_over_ranks: the maximum of a number over the ranks, a
    collective."""

    policy: Any
    task: Task
    seed: int
    step: int
    group_size: int
    max_over_ranks: Callable[[int], int]

    def rewards(self, rollouts: Rollouts) -> Tensor:
        """Returns the weighted sum of the rewards of scored rollouts, [rollout]; NaN where a component with a weight
        could not be scored."""
        import torch

        from mmrl.core.advantages import combined_reward
        from mmrl.rollouts import require

        return combined_reward(require(rollouts.rewards, "rewards"), torch.tensor(self.task.reward_weights))

    def score(self, samples: list[Sample], group: Tensor) -> Tensor:
        """Scores samples with the task's rewards. Returns the weighted sum, [sample]; NaN where a component with a
        weight could not be scored."""
        import torch

        from mmrl.core.advantages import combined_reward

        return combined_reward(self.task.score(samples, group), torch.tensor(self.task.reward_weights))


@dataclass(frozen=True)
class CollectedContext(MeasurementContext):
    """Inputs of a measurement that is made while rollouts are collected: they are scored, and groups are whole.
    sampling: samples further rollouts and responses."""

    sampling: RolloutSource


class Replaying(Protocol):
    """Replays rollouts under the policy with these weights; see `PreparedContext`."""

    def __call__(self, rollouts: Rollouts, name: str, weights: Weights = "sampling") -> Tensor: ...


@dataclass(frozen=True)
class PreparedContext(MeasurementContext):
    """Inputs of a measurement before the updates of a step.

    - micro_batches: the rows [n] of the rollouts in each micro-batch
    - replayed(rollouts, name, weights="sampling"): a field of `Replay`, such as "logp" or "value", under the policy
      with these weights; the rollouts may be changed, but not their number
    - weights(which): a context in which the policy has these weights
    - modules: networks that are trained beside the policy; checkpoints hold them
    - sum: the sum of a tensor over the ranks, a collective
    """

    micro_batches: list[Tensor]
    replayed: Replaying
    weights: Callable[[Weights], AbstractContextManager[Any]]
    modules: AuxiliaryModules
    sum: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class ReplayedContext:
    """Inputs of a measurement in an update. policy: has every ability that the measurement requires. engine: wraps the
    policy's module; passed to `Policy.replay` as `model`, it gives log-probabilities with a gradient. step: number of
    finished steps. seed: the run's seed. modules: networks that are trained beside the policy."""

    policy: Any
    engine: Any
    step: int
    seed: int
    modules: AuxiliaryModules


class Measurement(ABC, Generic[R_co]):
    """A quantity of rollouts that is computed and stored under `name` for the methods that list it in
    `Needs.measurements`. Equal measurements, which have to be frozen dataclasses, are computed once.

    requires: the ability that `context.policy` must have, checked before anything is loaded; None: none beyond
    `Policy`. cost: what it adds to a step, as text for `mmrl methods`. needs_sampling_weights: whether it must be
    computed with the weights that sampled the rollouts; they no longer exist if rollouts are sampled ahead of training.
    needs_frames: whether it reads `Episode.frames`. trains_copy: whether it trains a full copy of the policy, which
    takes memory and excludes ZeRO stage 3.
    """

    requires: ClassVar[type | None] = None
    cost: ClassVar[str]
    needs_sampling_weights: ClassVar[bool] = False
    needs_frames: ClassVar[bool] = False
    trains_copy: ClassVar[bool] = False

    @property
    @abstractmethod
    def name(self) -> str: ...

    @property
    def offers(self) -> frozenset[Offer]:
        """Returns what the policy's decisions must support beside `requires`, as keys of `OFFERS`."""
        return frozenset()

    @property
    def required(self) -> frozenset[Offer]:
        return self.offers if self.requires is None else self.offers | {self.requires}

    def check_prompt(self, prompt: Prompt) -> None:  # noqa: B027  (most measure any prompt)
        """Raises UserError where prompts like this one, the first of the job, cannot be measured."""


class CollectedMeasurement(Measurement[R_co]):
    """A measurement in `Rollouts.extras` that is computed where rollouts are collected."""

    @abstractmethod
    def measure(self, rollouts: Rollouts, context: CollectedContext) -> R_co: ...


class PreparedMeasurement(Measurement[R_co]):
    """A measurement in `Rollouts.extras` that is computed before the updates of a step, in the micro-batches of the
    updates. scores: whether it holds likelihoods of decisions. They are computed in the states of the first epoch,
    so they do not go with a policy that resamples its states in each epoch (`ResamplingStates`)."""

    scores: ClassVar[bool] = False

    def start(self, policy: Any, modules: AuxiliaryModules, seed: int) -> None:
        """Receives, before training, the policy and the networks that are trained beside it, for a policy that reads
        them while it samples. seed: the run's seed."""

    def played_with(self, modules: AuxiliaryModules) -> dict[str, Tensor]:
        """Returns the tensors of the networks that the policy plays with. They are saved beside its weights."""
        return {}

    def check_saved(self, tensors: Mapping[str, Tensor], folder: str) -> None:
        """Checks what `played_with` returned when the weights of a job that does not train were saved. Raises UserError
        if networks are missing that the policy plays with. folder: of the weights."""

    def start_saved(self, policy: Any, tensors: Mapping[str, Tensor], folder: str) -> None:
        """Receives, in a job that does not train, the policy and the tensors that `check_saved` checked. Raises
        UserError if they do not fit the job."""

    @abstractmethod
    def measure(self, rollouts: Rollouts, context: PreparedContext) -> R_co: ...


class ReplayedMeasurement(Measurement[R_co]):
    """A measurement in `Replay.extras` that is computed with a gradient in every update, beside the replay of a
    micro-batch."""

    @abstractmethod
    def measure(self, micro: Rollouts, context: ReplayedContext) -> R_co: ...

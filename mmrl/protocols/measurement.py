"""What a method wants to know of a step's rollouts beyond their rewards and log-probabilities."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from mmrl.protocols.offers import Offer

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.parts import RolloutSource, Task
    from mmrl.rollouts import Rollouts, Sample

R_co = TypeVar("R_co", covariant=True)  # a record; of one that is replayed whatever it gives


@dataclass(frozen=True)
class MeasurementContext:
    """What a measurement may use. policy: with every ability that the measurement requires. most: the largest of a
    number over the ranks, which all of them ask for alike. group_size: rollouts of a prompt; step: finished steps."""

    policy: Any
    task: Task
    seed: int
    step: int
    group_size: int
    most: Callable[[int], int]

    def rewards(self, rollouts: Rollouts) -> Tensor:
        """[rollout] the combined reward of scored rollouts, NaN as in `earned`."""
        import torch

        from mmrl.core.advantages import combined_reward
        from mmrl.rollouts import require

        return combined_reward(require(rollouts.rewards, "rewards"), torch.tensor(self.task.reward_weights))

    def earned(self, samples: list[Sample], group: Tensor) -> Tensor:
        """[sample] the combined reward; NaN where a component that counts could not be scored."""
        import torch

        from mmrl.core.advantages import combined_reward

        return combined_reward(self.task.score(samples, group), torch.tensor(self.task.reward_weights))


@dataclass(frozen=True)
class CollectedContext(MeasurementContext):
    """Beside the rollouts, which are scored, in whole groups. sampling: who is asked for rollouts and answers."""

    sampling: RolloutSource


@dataclass(frozen=True)
class PreparedContext(MeasurementContext):
    """Before the updates of a step. micro_batches: rows of the rollouts. replayed: a field of `Replay`, such as "logp"
    or "value", as the policy that made the rollouts says it of these rollouts or of others like them, such as a view
    of them. reference: inside it the policy has the reference's weights."""

    micro_batches: list[Tensor]
    replayed: Callable[[Rollouts, str], Tensor]
    reference: Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class ReplayedContext:
    """In an update. policy: with every ability that the measurement requires; engine: around its module, which replays
    with a gradient where it is given to the policy as `model`."""

    policy: Any
    engine: Any


class Measurement(ABC, Generic[R_co]):
    """Knowledge of rollouts that is filled in under `name` for the methods that list it in `Needs.measurements`; equal
    ones, which are to be frozen dataclasses, are taken once.

    requires: the ability that `context.policy` must have, refused before anything is loaded; None: none beyond
    `Policy`. cost: what it adds to a step, in words. of_sampling_weights: whether it must be taken with the weights
    that made the rollouts, which are not there any more where those are made ahead of training. films: whether it looks
    at `Episode.frames`.
    """

    requires: ClassVar[type | None] = None
    cost: ClassVar[str]
    of_sampling_weights: ClassVar[bool] = False
    films: ClassVar[bool] = False

    @property
    @abstractmethod
    def name(self) -> str: ...

    @property
    def offers(self) -> frozenset[Offer]:
        """What else decisions must support, beside `requires`."""
        return frozenset()

    @property
    def required(self) -> frozenset[Offer]:
        return self.offers if self.requires is None else self.offers | {self.requires}


class CollectedMeasurement(Measurement[R_co]):
    """A record of `Rollouts.extras` that is made where rollouts are collected."""

    @abstractmethod
    def measure(self, rollouts: Rollouts, context: CollectedContext) -> R_co: ...


class PreparedMeasurement(Measurement[R_co]):
    """A record of `Rollouts.extras` that is made before the updates of a step, in the micro-batches that are learned
    from."""

    @abstractmethod
    def measure(self, rollouts: Rollouts, context: PreparedContext) -> R_co: ...


class ReplayedMeasurement(Measurement[R_co]):
    """Something that is computed with its gradient in every update, beside the replay of a micro-batch, for
    `Replay.extras`."""

    @abstractmethod
    def measure(self, micro: Rollouts, context: ReplayedContext) -> R_co: ...

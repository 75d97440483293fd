"""Episodes as they are stored: observations, executed chunks of actions, and rewards."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class RobotObservation(Protocol):
    """Observations of B environments, as `mmrl.sims.Observation` has them."""

    @property
    def images(self) -> NDArray[np.uint8]: ...  # [B, height, width, 3]
    @property
    def state(self) -> NDArray[np.float32]: ...  # [B, state]
    @property
    def instructions(self) -> list[str]: ...  # B
    @property
    def cameras(self) -> tuple[str, ...]: ...


@dataclass(frozen=True)
class Trajectory:
    """One episode of T policy steps. The observation after the last one is kept too: a value may be computed of it."""

    instruction: str
    cameras: tuple[str, ...]  # see `Observation`
    images: NDArray[np.uint8]  # [T + 1, height, width, 3]
    state: NDArray[np.float32]  # [T + 1, state]
    actions: NDArray[np.float32]  # [T, chunk, action], in the robot's units
    valid: NDArray[np.bool_]  # [T, chunk], which of them were executed: a prefix
    rewards: NDArray[np.float32]  # [T], of the simulator, summed over a chunk
    terminated: bool  # ended by itself, not by the time limit
    success: bool  # at any time

    def __len__(self) -> int:
        return len(self.rewards)


@dataclass(frozen=True)
class RewardsToGo:
    """Rewards that an episode earned from one of its steps on.

    rewards: [step] float32, of the simulator, from this step to the last. before: [step] int64, actions that were
    executed between this step and each of them. outcome: what the task paid for the whole episode, with its last step.
    """

    rewards: NDArray[np.float32]
    before: NDArray[np.int64]
    outcome: float

    def after(self, steps: int) -> RewardsToGo:
        """Returns what is earned from `steps` steps later on."""
        return RewardsToGo(self.rewards[steps:], self.before[steps:] - self.before[steps], self.outcome)

    def discounted(self, gamma: float, simulator_reward: float) -> float:
        """Returns sum_k gamma^before_k simulator_reward rewards_k + gamma^before_last outcome. gamma: discount of an
        action."""
        discounts = gamma ** self.before.astype(np.float64)
        return float(simulator_reward * (discounts * self.rewards).sum() + discounts[-1] * self.outcome)


@dataclass(frozen=True)
class ChunkTransition:
    """The transition of a chunk of k actions: r, gamma^k, the observation after it, and whether the episode terminated.

    reward: sum of the discounted rewards of the chunk. next_observation: of one row; None where the episode terminated
    with the chunk, and where it was cut off there and no later observation was recorded.
    """

    reward: float
    discount: float
    next_observation: RobotObservation | None
    terminated: bool


@dataclass(frozen=True)
class EpisodeTail(ABC):
    """A recorded episode from one of its steps on.

    rewards: the rewards of these steps. actions: number of actions that were executed in them. terminated: whether the
    episode ended by itself, not by a time limit.
    """

    rewards: RewardsToGo
    actions: int
    terminated: bool

    @abstractmethod
    def observation(self, step: int) -> RobotObservation | None:
        """Returns the observation before the step that is `step` steps later, one row; None where none was recorded.
        The number of steps itself means the observation after the last one."""

    def transition(self, actions: int, gamma: float, simulator_reward: float) -> ChunkTransition:
        """Returns the transition of the first `actions` actions, or of all where there are fewer. gamma: discount of an
        action; simulator_reward: weight of the simulator's rewards, beside the outcome, which the last step pays."""
        before = self.rewards.before
        steps = int((before < actions).sum())
        last = steps == len(before)
        discounts = gamma ** before[:steps].astype(np.float64)
        reward = simulator_reward * (discounts * self.rewards.rewards[:steps]).sum()
        reward += discounts[-1] * self.rewards.outcome if last else 0.0
        terminated = last and self.terminated
        return ChunkTransition(
            float(reward),
            gamma ** (self.actions if last else int(before[steps])),
            None if terminated else self.observation(steps),
            terminated,
        )

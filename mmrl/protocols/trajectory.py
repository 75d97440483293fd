"""Episodes of a robot policy in the form in which they are stored: observations, executed action chunks, rewards."""

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
    def instructions(self) -> list[str]: ...  # one per environment
    @property
    def cameras(self) -> tuple[str, ...]: ...


@dataclass(frozen=True)
class Trajectory:
    """One episode of T policy steps. A policy step is one call of the policy, which returns a chunk of actions. The
    observation after the last step is kept too, for value estimates."""

    instruction: str
    cameras: tuple[str, ...]  # names, see `mmrl.sims.Observation`
    images: NDArray[np.uint8]  # [T + 1, height, width, 3]
    state: NDArray[np.float32]  # [T + 1, state]
    actions: NDArray[np.float32]  # [T, chunk, action], in the robot's units
    valid: NDArray[np.bool_]  # [T, chunk], True for actions that were executed; these come first in a chunk
    rewards: NDArray[np.float32]  # [T], the simulator's, summed over the chunk
    terminated: bool  # whether the environment ended it; False: the time limit did
    success: bool  # at any time during the episode

    def __len__(self) -> int:
        return len(self.rewards)


@dataclass(frozen=True)
class RewardsToGo:
    """The rewards of an episode from one of its policy steps to the end.

    rewards: [step] float32, the simulator's rewards. elapsed: [step] int64, number of actions that were executed since
    the first of these steps. outcome: the task's reward for the whole episode, which counts as given at the last step.
    """

    rewards: NDArray[np.float32]
    elapsed: NDArray[np.int64]
    outcome: float

    def after(self, steps: int) -> RewardsToGo:
        """Returns the rewards from the step that is `steps` steps later, with `elapsed` counted from there."""
        return RewardsToGo(self.rewards[steps:], self.elapsed[steps:] - self.elapsed[steps], self.outcome)

    def discounted(self, gamma: float, simulator_reward: float) -> float:
        """Returns the discounted return, sum_k gamma^elapsed_k simulator_reward rewards_k + gamma^elapsed_last outcome.

        gamma: discount for each action. simulator_reward: weight of the simulator's rewards."""
        discounts = gamma ** self.elapsed.astype(np.float64)
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
        """Returns the observation before the step that is `step` steps later, one row; None if it was not recorded. If
        `step` is the number of steps, it is the observation after the last one."""

    def transition(self, actions: int, gamma: float, simulator_reward: float) -> ChunkTransition:
        """Returns the transition of the first `actions` actions, or of all if there are fewer. gamma: discount per
        action; simulator_reward: weight of the simulator's rewards. The outcome is added to the reward of the last
        step."""
        before = self.rewards.elapsed  # [step], number of actions that were executed before each step
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

"""Episodes as they are stored: observations, executed chunks of actions, and rewards."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


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

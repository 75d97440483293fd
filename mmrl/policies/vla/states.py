"""Standardisation of the robot's state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmrl.errors import UserError
from mmrl.policies.vla.heads.codec import Units
from mmrl.sims import VectorSim

EPISODES = 32
FIRST_SEED = 1 << 31  # neither trained on nor held out
LEAST = 0.01  # m or rad or per second: lower bound of std, so that what hardly moves is not amplified
MOST = 10.0


@dataclass(frozen=True)
class StateStatistics:
    """Mean and standard deviation of a state, [state] each."""

    mean: NDArray[np.float32]
    std: NDArray[np.float32]

    def standardised(self, state: NDArray[np.float32]) -> NDArray[np.float32]:
        """Returns (state - mean) / std [..., state], with std at least `LEAST`, clipped to +-`MOST`."""
        return ((state - self.mean) / self.std.clip(LEAST)).clip(-MOST, MOST)

    def to_json(self) -> dict[str, list[float]]:
        return {"mean": self.mean.tolist(), "std": self.std.tolist()}

    @staticmethod
    def from_json(tree: dict[str, Any], state_dim: int) -> StateStatistics:
        """Reads statistics. Raises UserError for another length than `state_dim`."""
        if len(tree["mean"]) != state_dim:
            raise UserError(f"the model knows a state of {len(tree['mean'])} numbers, the simulator has {state_dim}")
        return StateStatistics(np.array(tree["mean"], np.float32), np.array(tree["std"], np.float32))


def measure(sim: VectorSim, actions: Units | None, episodes: int = EPISODES) -> StateStatistics:
    """Measures the states of episodes with random actions, over the simulator's tasks in turn; deterministic."""
    rng, observed = np.random.default_rng(0), []
    for first in range(0, episodes, len(sim)):
        numbers = range(first, min(first + len(sim), episodes))
        tasks = [sim.simulator.tasks[i % len(sim.simulator.tasks)] for i in numbers]
        observation = sim.reset([FIRST_SEED + i for i in numbers], tasks)
        while (running := sim.running).any():
            observed.append(observation.state[running])
            drawn = rng.uniform(-1, 1, (len(sim), 1, sim.simulator.action_dim))
            observation = sim.step(drawn if actions is None else actions.to_robot(drawn)).observation
    states = np.concatenate(observed)
    return StateStatistics(states.mean(0, np.float64).astype(np.float32), states.std(0, np.float64).astype(np.float32))

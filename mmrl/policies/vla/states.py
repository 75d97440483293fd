"""Standardisation of the robot's state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmrl.errors import UserError
from mmrl.policies.vla.heads.codec import ActionNormalizer
from mmrl.sims import VectorSim

EPISODES = 32  # from which statistics are measured
FIRST_SEED = 1 << 31  # seeds of start states that neither training nor evaluation uses
MIN_STD = 0.01  # in the state's units (m, rad, per second), so that nearly constant numbers are not amplified
MAX_ABS = 10.0  # bound of a standardised number


@dataclass(frozen=True)
class StateStatistics:
    """Standardises states by their mean and standard deviation."""

    mean: NDArray[np.float32]  # [state]
    std: NDArray[np.float32]  # [state]

    def standardize(self, state: NDArray[np.float32]) -> NDArray[np.float32]:
        """Returns (state - mean) / std, [..., state] as the state. std is at least `MIN_STD`; the result is clipped to
        +-`MAX_ABS`."""
        return ((state - self.mean) / self.std.clip(MIN_STD)).clip(-MAX_ABS, MAX_ABS)

    def to_json(self) -> dict[str, list[float]]:
        """Returns the statistics as `from_json` reads them."""
        return {"mean": self.mean.tolist(), "std": self.std.tolist()}

    @staticmethod
    def from_json(tree: dict[str, Any], state_dim: int) -> StateStatistics:
        """Rebuilds statistics from the result of `to_json`. Raises UserError if their length is not `state_dim`."""
        if len(tree["mean"]) != state_dim:
            raise UserError(
                f"the model was trained on states of {len(tree['mean'])} numbers, but the simulator's have "
                f"{state_dim}; use the simulator that it was trained in"
            )
        return StateStatistics(np.array(tree["mean"], np.float32), np.array(tree["std"], np.float32))


def measure_statistics(
    sim: VectorSim, normalizer: ActionNormalizer | None, episodes: int = EPISODES
) -> StateStatistics:
    """Plays `episodes` episodes with random actions, with the simulator's tasks in turn, and returns the statistics of
    their states. normalizer: converts actions from [-1, 1] to the robot's units; None: these are [-1, 1] too. The
    result is deterministic."""
    rng, observed_states = np.random.default_rng(0), []
    for first in range(0, episodes, len(sim)):
        indices = range(first, min(first + len(sim), episodes))
        tasks = [sim.simulator.tasks[i % len(sim.simulator.tasks)] for i in indices]
        observation = sim.reset([FIRST_SEED + i for i in indices], tasks)
        while (running := sim.running).any():
            observed_states.append(observation.state[running])
            actions = rng.uniform(-1, 1, (len(sim), 1, sim.simulator.action_dim))
            observation = sim.step(actions if normalizer is None else normalizer.to_robot(actions)).observation
    states = np.concatenate(observed_states)
    return StateStatistics(states.mean(0, np.float64).astype(np.float32), states.std(0, np.float64).astype(np.float32))

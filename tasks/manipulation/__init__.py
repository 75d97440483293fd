"""Robot manipulation in a simulator: start states, what an episode earns, and demonstrations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmrl.errors import UserError
from mmrl.rewards import RewardSet, RewardSpec
from mmrl.rollouts import Prompt, Sample
from sims import Simulator, VectorSim
from sims import build as build_simulator
from tasks.manipulation.config import Demonstrations, ManipulationConfig, parse
from tasks.manipulation.episodes import (
    FIRST_TRAINING_SEED,
    DemonstrationSource,
    EpisodeSource,
    Recorded,
    record_expert,
)

__all__ = ["Manipulation", "ManipulationConfig", "build"]


class Manipulation:
    """A task: start states to train on (or demonstrations of it), start states held out, rewards.

    `accuracy` is success at any time.
    """

    def __init__(self, config: ManipulationConfig, seed: int) -> None:
        self.config, self.simulator_rows = config, config.rows
        rewards = RewardSet(config.rewards)
        self.reward_names, self.reward_weights = rewards.names, rewards.weights
        self._rewards, self._success = rewards, RewardSet([RewardSpec("tasks.manipulation.rewards:success")])
        self.seed = seed
        self.evaluation = EpisodeSource(config.tasks, config.eval_size, config.eval_seed)

    @cached_property
    def train(self) -> EpisodeSource | DemonstrationSource:
        """Demonstrations are recorded or opened when first asked for: evaluation needs none.

        Raises UserError as `make_simulator`, and where no demonstration can be had.
        """
        config = self.config
        starts = EpisodeSource(config.tasks, config.train_size, FIRST_TRAINING_SEED + self.seed * config.train_size)
        return starts if config.demonstrations is None else self._demonstrated(starts, config.demonstrations)

    def make_simulator(self, rows: int) -> VectorSim:
        """`rows` environments. Raises UserError as `sims.build`, and for tasks that the simulator does not have."""
        config = self.config
        sim = build_simulator(
            config.simulator,
            rows,
            config.options,
            workers=min(config.workers, rows),
            ray=config.ray,
            turns=min(config.turns, rows),
            deadline_s=config.deadline_s,
        )
        for task in self.config.tasks:
            if task not in sim.simulator.tasks:
                sim.close()
                raise UserError(f"task.tasks: {self.config.simulator} has no {task!r}; it has {sim.simulator.tasks}")
        if self.config.instructions == "shuffled":
            sim.simulator = Shuffled(sim.simulator)
        return sim

    def score(self, samples: Sequence[Sample], group: Tensor | None = None) -> Tensor:
        """Unweighted reward components [rollout, component], float32, NaN for episodes that the simulator lost."""
        return self._rewards.score(samples)

    def accuracy(self, samples: Sequence[Sample]) -> Tensor:
        """Success at any time [rollout], float32, NaN for episodes that the simulator lost."""
        return self._success.score(samples)[:, 0]

    def measures(self, samples: Sequence[Sample], group: Tensor | None = None) -> dict[str, Tensor]:
        """Of each episode [rollout]: executed actions, success when it ended, and whether the simulator lost it."""
        episodes = [s.episode for s in samples if s.episode is not None]
        return {
            "episode/length": torch.tensor([float(e.length) for e in episodes]),
            "episode/success_at_end": torch.tensor([float(e.success_at_end) for e in episodes]),
            "episode/lost": torch.tensor([float(e.lost) for e in episodes]),
        }

    def _demonstrated(self, source: EpisodeSource, shown: Demonstrations) -> DemonstrationSource:
        if shown.lerobot is not None:
            return DemonstrationSource(self._dataset(shown))
        prompts: list[Prompt] = [source[i] for i in range((shown.episodes or 200) * len(self.config.tasks))]
        starts = [(p.metadata["task"], p.metadata["seed"]) for p in prompts]
        with self.make_simulator(min(self.config.rows, len(starts))) as sim:
            made = record_expert(sim, starts, noise=shown.noise, successful=shown.successful, seed=self.seed)
        return DemonstrationSource(made)

    def _dataset(self, shown: Demonstrations) -> list[Recorded]:
        try:
            from tasks.manipulation import lerobot
        except ModuleNotFoundError as error:
            raise UserError(f"task.demonstrations.lerobot: {error}; pip install 'mmrl[mujoco]'") from error
        assert shown.lerobot is not None
        with self.make_simulator(1) as sim:
            like = sim.simulator
        return lerobot.load(
            shown.lerobot,
            lerobot.Columns(shown.camera, shown.state, shown.action),
            episodes=shown.episodes,
            memory=shown.memory,
            action_dim=like.action_dim,
            state_dim=like.state_dim,
            image_shape=like.image_shape,
        )


class Shuffled:
    """A simulator whose rows show one another's instructions: that of the next row that was started with them."""

    def __init__(self, simulator: Simulator) -> None:
        self.simulator = simulator
        self.started: list[int] = []
        self.count, self.action_dim = simulator.count, simulator.action_dim
        self.state_dim, self.image_shape, self.tasks = simulator.state_dim, simulator.image_shape, simulator.tasks

    def reset(self, rows: Sequence[int], seeds: Sequence[int], tasks: Sequence[str]) -> Any:
        self.started = list(rows)
        return self.simulator.reset(rows, seeds, tasks)

    def instruction(self, row: int) -> str:
        """That of the first following row with another one; its own if all are the same."""
        own, place = self.simulator.instruction(row), self.started.index(row)
        others = [self.simulator.instruction(r) for r in self.started[place + 1 :] + self.started[:place]]
        return next((other for other in others if other != own), own)

    def step(self, rows: Sequence[int], actions: np.ndarray) -> Any:
        return self.simulator.step(rows, actions)

    def expert(self, rows: Sequence[int], length: int) -> np.ndarray:
        return self.simulator.expert(rows, length)

    def close(self) -> None:
        self.simulator.close()


def build(options: Mapping[str, Any], seed: int) -> Manipulation:
    """The task that `options` (see `ManipulationConfig`) describe; `seed` draws the start states to train on.

    Raises ValueError in one line for a key or value that is not valid, and UserError as `make_simulator`.
    """
    return Manipulation(parse(options), seed)

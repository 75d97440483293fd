"""Robot manipulation in a simulator: start states, what an episode earns, and demonstrations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmrl.errors import UserError
from mmrl.protocols.parts import Source
from mmrl.rewards import RewardSet, RewardSpec
from mmrl.rewards.guarded import GuardedReward
from mmrl.rollouts import Sample
from mmrl.sims import Simulator, VectorSim
from mmrl.sims import build as build_simulator
from mmrl.sims.vector.transitions import cameras_of
from mmrl.tasks.manipulation.episodes import FIRST_TRAINING_SEED, EpisodeSource
from mmrl.tasks.manipulation.judged import SuccessJudge
from mmrl.tasks.manipulation.settings import ManipulationSettings


class Manipulation:
    """A task: start states to train on (or demonstrations of it), start states held out, rewards.

    `accuracy` is success at any time.
    """

    def __init__(self, settings: ManipulationSettings, seed: int) -> None:
        self.settings, self.simulator_rows = settings, settings.rows
        rewards = RewardSet(settings.rewards)
        self.reward_names, self.reward_weights = rewards.names, rewards.weights
        self._rewards, self._success = rewards, RewardSet([RewardSpec(name="mmrl.tasks.manipulation.rewards:success")])
        judges = [
            (n, c.reward)
            for n, c in zip(rewards.names, rewards.components, strict=True)
            if isinstance(c, GuardedReward)
        ]
        self._judges = {name: judge for name, judge in judges if isinstance(judge, SuccessJudge)}
        self.watched = bool(self._judges)
        self.seed = seed
        self.evaluation = EpisodeSource(settings.eval_tasks or settings.tasks, settings.eval_size, settings.eval_seed)

    @cached_property
    def train(self) -> Source:
        """Demonstrations are recorded or opened when first asked for: evaluation needs none.

        Raises UserError as `make_simulator`, and where no demonstration can be had.
        """
        settings = self.settings
        first = FIRST_TRAINING_SEED + self.seed * settings.train_size
        starts = EpisodeSource(settings.tasks, settings.train_size, first)
        return starts if settings.demonstrations is None else settings.demonstrations.prompts(self, starts)

    def make_simulator(self, rows: int) -> VectorSim:
        """`rows` environments. Raises UserError as `sims.build`, and for tasks that the simulator does not have."""
        settings = self.settings
        sim = build_simulator(
            settings.simulator,
            rows,
            settings.options,
            workers=min(settings.workers, rows),
            ray=settings.ray,
            turns=min(settings.turns, rows),
            deadline_s=settings.deadline_s,
        )
        played = [("tasks", task) for task in settings.tasks]
        played += [("eval_tasks", task) for task in settings.eval_tasks or ()]
        for key, task in played:
            if task not in sim.simulator.tasks:
                sim.close()
                raise UserError(f"task.{key}: {self.settings.simulator} has no {task!r}; it has {sim.simulator.tasks}")
        if self.settings.instructions == "shuffled":
            sim.simulator = Shuffled(sim.simulator)
        return sim

    def score(self, samples: Sequence[Sample], group: Tensor | None = None) -> Tensor:
        """Unweighted reward components [rollout, component], float32, NaN for episodes that the simulator lost. group:
        [rollout], which start state an episode has, for rewards that compare the rollouts of a group."""
        return self._rewards.score(samples, group)

    def accuracy(self, samples: Sequence[Sample]) -> Tensor:
        """Success at any time [rollout], float32, NaN for episodes that the simulator lost."""
        return self._success.score(samples)[:, 0]

    def measures(self, samples: Sequence[Sample], group: Tensor | None = None) -> dict[str, Tensor]:
        """Of each episode [rollout]: whether the simulator lost it, and, NaN where it did, executed actions and success
        when it ended; of a judge of success whether it sees one, and whether the simulator (at any time) does not
        agree; of a head that reasons, how many latents it drew before a chunk, NaN where it drew none."""
        episodes = [s.episode for s in samples if s.episode is not None]
        judged: dict[str, Tensor] = {}
        for name, judge in self._judges.items():
            judged |= judged_beside(name, judge, samples)
        reasoned = [e.reasoning for e in episodes if e.reasoning is not None]  # of all, or of none
        if reasoned:
            judged["episode/reasoning"] = torch.tensor(reasoned)
        return judged | {
            "episode/length": torch.tensor([math.nan if e.lost else float(e.length) for e in episodes]),
            "episode/success_at_end": torch.tensor([math.nan if e.lost else float(e.success_at_end) for e in episodes]),
            "episode/lost": torch.tensor([float(e.lost) for e in episodes]),
        }


def judged_beside(name: str, judge: SuccessJudge, samples: Sequence[Sample]) -> dict[str, Tensor]:
    """[sample], NaN where the judge says nothing, and for episodes that an evaluation which goes on has read from its
    file: no images are kept there."""
    seen = [
        i for i, s in enumerate(samples) if s.episode is not None and (s.episode.lost or s.episode.frames is not None)
    ]
    success, apart = torch.full((2, len(samples)), torch.nan)
    for i, verdict in zip(seen, judge.verdicts([samples[i] for i in seen]), strict=True):
        episode = samples[i].episode
        if verdict is not None and episode is not None:
            success[i], apart[i] = float(verdict), float(verdict != episode.success)
    return {f"episode/{name}_success": success, f"episode/{name}_disagreement": apart}


class Shuffled:
    """A simulator whose rows show one another's instructions: that of the next row that was started with them."""

    def __init__(self, simulator: Simulator) -> None:
        self.simulator = simulator
        self.started: list[int] = []
        self.count, self.action_dim = simulator.count, simulator.action_dim
        self.state_dim, self.image_shape, self.tasks = simulator.state_dim, simulator.image_shape, simulator.tasks
        self.cameras = cameras_of(simulator)

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

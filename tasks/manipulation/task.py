"""The task of robot manipulation in a simulator: start states, rewards of episodes, and demonstrations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from mmrl.errors import UserError
from mmrl.protocols.parts import Source
from mmrl.rewards import RewardSet, RewardSpec
from mmrl.rewards.guarded import GuardedReward
from mmrl.rollouts import Sample
from mmrl.sims import Simulator, Transition, VectorSim
from mmrl.sims import build as build_simulator
from mmrl.sims.vector.transitions import action_bounds_of, cameras_of
from mmrl.tasks.manipulation.episodes import FIRST_TRAINING_SEED, EpisodeSource
from mmrl.tasks.manipulation.judged import ProgressJudge, SuccessJudge
from mmrl.tasks.manipulation.settings import ManipulationSettings


class Manipulation:
    """The task: training start states, held-out start states, demonstrations and rewards. seed: the run's seed; runs
    with different seeds have different training start states."""

    def __init__(self, settings: ManipulationSettings, seed: int) -> None:
        """seed: the seed of the run, which determines the start states of training episodes."""
        self.settings, self.simulator_rows = settings, settings.rows
        rewards = RewardSet(settings.rewards)
        self.reward_names, self.reward_weights = rewards.names, rewards.weights
        self.rewards, self._success = rewards, RewardSet([RewardSpec(name="mmrl.tasks.manipulation.rewards:success")])
        self._judges: dict[str, SuccessJudge] = {}
        for name, component in zip(rewards.names, rewards.components, strict=True):
            if isinstance(component, GuardedReward) and isinstance(component.reward, SuccessJudge):
                self._judges[name] = component.reward
        # whether rewards need the images of episodes
        self.watched = bool(self._judges) or any(
            isinstance(component, GuardedReward) and isinstance(component.reward, ProgressJudge)
            for component in rewards.components
        )
        self.seed = seed
        first_seed = FIRST_TRAINING_SEED + seed * settings.train_size
        self.train = EpisodeSource(settings.tasks, settings.train_size, first_seed)
        self.evaluation = EpisodeSource(settings.eval_tasks or settings.tasks, settings.eval_size, settings.eval_seed)

    @cached_property
    def demonstrations(self) -> Source | None:
        """The demonstrations, which are recorded or opened on first use; None if the settings have none.

        Raises UserError as `make_simulator`, and if there is no usable demonstration.
        """
        demonstrations = self.settings.demonstrations
        return None if demonstrations is None else demonstrations.prompts(self, self.train)

    def make_simulator(self, rows: int) -> VectorSim:
        """Builds `rows` environments. Raises UserError as `mmrl.sims.build`, and for tasks that the simulator does not
        have."""
        settings = self.settings
        sim = build_simulator(
            settings.simulator,
            rows,
            settings.options,
            workers=min(settings.workers, rows),
            python=settings.python,
            ray=settings.ray,
            turns=min(settings.turns, rows),
            deadline_s=settings.deadline_s,
        )
        tasks = [("tasks", task) for task in settings.tasks]
        tasks += [("eval_tasks", task) for task in settings.eval_tasks or ()]
        for key, task in tasks:
            if task not in sim.simulator.tasks:
                sim.close()
                available = ", ".join(sim.simulator.tasks)
                raise UserError(f"task.{key}: {self.settings.simulator} has no task {task!r}; it has {available}")
        if self.settings.instructions == "shuffled":
            sim.simulator = ShuffledInstructions(sim.simulator)
        return sim

    def score(self, samples: Sequence[Sample], group: Tensor | None = None) -> Tensor:
        """Returns unweighted rewards [rollout, component], float32, NaN for episodes in which the simulator failed.
        group: [rollout], the index of each episode's start state, for rewards that compare the rollouts of a group."""
        return self.rewards.score(samples, group)

    def unscored_reasons(self) -> Mapping[str, str]:
        """Returns for each reward with a NaN in the last `score` why it could not be computed."""
        return self.rewards.reasons

    def accuracy(self, samples: Sequence[Sample]) -> Tensor:
        """Returns success at any time of the episode [rollout], float32, NaN if the simulator failed."""
        return self._success.score(samples)[:, 0]

    def measures(self, samples: Sequence[Sample], group: Tensor | None = None) -> dict[str, Tensor]:
        """Returns metrics [rollout] by name: the number of executed actions, the sum of the simulator's rewards,
        success at the end (all NaN if the simulator failed), and whether the simulator failed; for each judge of
        success the metrics of `judge_measures`; and for a latent action head the mean number of latents before a
        chunk."""
        episodes = [s.episode for s in samples if s.episode is not None]
        optional: dict[str, Tensor] = {}
        for name, judge in self._judges.items():
            optional |= judge_measures(name, judge, samples)
        latents = [e.reasoning for e in episodes if e.reasoning is not None]  # of all episodes, or of none
        if latents:
            optional["episode/reasoning"] = torch.tensor(latents)
        return optional | {
            "episode/length": torch.tensor([math.nan if e.lost else float(e.length) for e in episodes]),
            "episode/return": torch.tensor([math.nan if e.lost else e.reward for e in episodes]),
            "episode/success_at_end": torch.tensor([math.nan if e.lost else float(e.success_at_end) for e in episodes]),
            "episode/lost": torch.tensor([float(e.lost) for e in episodes]),
        }


def judge_measures(name: str, judge: SuccessJudge, samples: Sequence[Sample]) -> dict[str, Tensor]:
    """Returns the success according to a judge, and whether the simulator's success differs from it, [sample] each.
    NaN if the judge gives no verdict, and for episodes without images, which a resumed evaluation has read from its
    file. name: the judge's name in the metrics."""
    indices = [
        i for i, s in enumerate(samples) if s.episode is not None and (s.episode.lost or s.episode.frames is not None)
    ]
    success, disagreement = torch.full((2, len(samples)), torch.nan)
    for i, verdict in zip(indices, judge.verdicts([samples[i] for i in indices]), strict=True):
        episode = samples[i].episode
        if verdict is not None and episode is not None:
            success[i], disagreement[i] = float(verdict), float(verdict != episode.success)
    return {f"episode/{name}_success": success, f"episode/{name}_disagreement": disagreement}


class ShuffledInstructions:
    """A simulator in which each row has the instruction of the next started row whose instruction differs."""

    def __init__(self, simulator: Simulator) -> None:
        self.simulator = simulator
        self.started: list[int] = []  # rows with an episode, ascending
        self.count, self.action_dim = simulator.count, simulator.action_dim
        self.state_dim, self.image_shape, self.tasks = simulator.state_dim, simulator.image_shape, simulator.tasks
        self.cameras, self.action_bounds = cameras_of(simulator), action_bounds_of(simulator)

    def reset(self, rows: Sequence[int], seeds: Sequence[int], tasks: Sequence[str]) -> Transition:
        """Starts an episode in each of `rows`. If `rows` are 0, 1, ..., all other rows count as not started; otherwise
        `rows` join those that have started."""
        is_new_batch = list(rows) == list(range(len(rows)))
        self.started = sorted(set(rows) if is_new_batch else {*self.started, *rows})
        return self.simulator.reset(rows, seeds, tasks)

    def instruction(self, row: int) -> str:
        """Returns the instruction of another started row: the next one whose instruction differs, where the first row
        follows the last. Returns the row's own if all are the same."""
        instruction, position = self.simulator.instruction(row), self.started.index(row)
        others = [self.simulator.instruction(r) for r in self.started[position + 1 :] + self.started[:position]]
        return next((other for other in others if other != instruction), instruction)

    def step(self, rows: Sequence[int], actions: np.ndarray) -> Transition:
        return self.simulator.step(rows, actions)

    def expert(self, rows: Sequence[int], length: int) -> np.ndarray:
        return self.simulator.expert(rows, length)

    def close(self) -> None:
        self.simulator.close()

"""Robot manipulation in a simulator: start states, rewards of episodes, and demonstrations."""

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
from mmrl.tasks.manipulation.judged import SuccessJudge
from mmrl.tasks.manipulation.settings import ManipulationSettings


class Manipulation:
    """A task: start states to train on, start states held out, demonstrations, rewards.

    `accuracy` is success at any time.
    """

    def __init__(self, settings: ManipulationSettings, seed: int) -> None:
        self.settings, self.simulator_rows = settings, settings.rows
        rewards = RewardSet(settings.rewards)
        self.reward_names, self.reward_weights = rewards.names, rewards.weights
        self.rewards, self._success = rewards, RewardSet([RewardSpec(name="mmrl.tasks.manipulation.rewards:success")])
        judges = [
            (n, c.reward)
            for n, c in zip(rewards.names, rewards.components, strict=True)
            if isinstance(c, GuardedReward)
        ]
        self._judges = {name: judge for name, judge in judges if isinstance(judge, SuccessJudge)}
        self.watched = bool(self._judges)
        self.seed = seed
        first = FIRST_TRAINING_SEED + seed * settings.train_size
        self.train = EpisodeSource(settings.tasks, settings.train_size, first)
        self.evaluation = EpisodeSource(settings.eval_tasks or settings.tasks, settings.eval_size, settings.eval_seed)

    @cached_property
    def demonstrations(self) -> Source | None:
        """The demonstrations, which are recorded or opened at the first use; None where there are none.

        Raises UserError as `make_simulator`, and where there is no demonstration.
        """
        shown = self.settings.demonstrations
        return None if shown is None else shown.prompts(self, self.train)

    def make_simulator(self, rows: int) -> VectorSim:
        """Builds `rows` environments. Raises UserError as `sims.build`, and for tasks that the simulator does not
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
        """Returns unweighted reward components [rollout, component], float32, NaN for episodes that the simulator lost.
        group: [rollout], the start state of an episode, for rewards that compare the rollouts of a group."""
        return self.rewards.score(samples, group)

    def unscored_reasons(self) -> Mapping[str, str]:
        """Why a rollout was not scored, by reward."""
        return self.rewards.reasons

    def accuracy(self, samples: Sequence[Sample]) -> Tensor:
        """Returns success at any time [rollout], float32, NaN for episodes that the simulator lost."""
        return self._success.score(samples)[:, 0]

    def measures(self, samples: Sequence[Sample], group: Tensor | None = None) -> dict[str, Tensor]:
        """Returns measures of each episode [rollout]: whether the simulator lost it; executed actions and success at
        its end, NaN where it was lost; for each judge of success its verdict, and whether that differs from the
        simulator's success at any time; for a head that reasons the latents before a chunk, NaN where there are
        none."""
        episodes = [s.episode for s in samples if s.episode is not None]
        judged: dict[str, Tensor] = {}
        for name, judge in self._judges.items():
            judged |= judge_measures(name, judge, samples)
        reasoned = [e.reasoning for e in episodes if e.reasoning is not None]  # of all, or of none
        if reasoned:
            judged["episode/reasoning"] = torch.tensor(reasoned)
        return judged | {
            "episode/length": torch.tensor([math.nan if e.lost else float(e.length) for e in episodes]),
            "episode/success_at_end": torch.tensor([math.nan if e.lost else float(e.success_at_end) for e in episodes]),
            "episode/lost": torch.tensor([float(e.lost) for e in episodes]),
        }


def judge_measures(name: str, judge: SuccessJudge, samples: Sequence[Sample]) -> dict[str, Tensor]:
    """Returns the success that a judge sees, and whether the simulator disagrees, [sample]: NaN where the judge gives
    no verdict, and for episodes that a resumed evaluation has read from its file, which has no images."""
    indices = [
        i for i, s in enumerate(samples) if s.episode is not None and (s.episode.lost or s.episode.frames is not None)
    ]
    success, apart = torch.full((2, len(samples)), torch.nan)
    for i, verdict in zip(indices, judge.verdicts([samples[i] for i in indices]), strict=True):
        episode = samples[i].episode
        if verdict is not None and episode is not None:
            success[i], apart[i] = float(verdict), float(verdict != episode.success)
    return {f"episode/{name}_success": success, f"episode/{name}_disagreement": apart}


class Shuffled:
    """A simulator whose rows show one another's instructions: that of the next row."""

    def __init__(self, simulator: Simulator) -> None:
        self.simulator = simulator
        self.started: list[int] = []
        self.count, self.action_dim = simulator.count, simulator.action_dim
        self.state_dim, self.image_shape, self.tasks = simulator.state_dim, simulator.image_shape, simulator.tasks
        self.cameras, self.action_bounds = cameras_of(simulator), action_bounds_of(simulator)

    def reset(self, rows: Sequence[int], seeds: Sequence[int], tasks: Sequence[str]) -> Transition:
        """Starts episodes. Rows from the first on begin anew together; single others join those that are there."""
        first = list(rows) == list(range(len(rows)))
        self.started = sorted(set(rows) if first else {*self.started, *rows})
        return self.simulator.reset(rows, seeds, tasks)

    def instruction(self, row: int) -> str:
        """Returns the instruction of the next row with another one; the row's own if all are the same."""
        instruction, position = self.simulator.instruction(row), self.started.index(row)
        others = [self.simulator.instruction(r) for r in self.started[position + 1 :] + self.started[:position]]
        return next((other for other in others if other != instruction), instruction)

    def step(self, rows: Sequence[int], actions: np.ndarray) -> Transition:
        return self.simulator.step(rows, actions)

    def expert(self, rows: Sequence[int], length: int) -> np.ndarray:
        return self.simulator.expert(rows, length)

    def close(self) -> None:
        self.simulator.close()

"""Start states to play from, and demonstrations to learn from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmrl.errors import UserError
from mmrl.protocols.trajectory import EpisodeTail, RewardsToGo
from mmrl.rollouts import Prompt
from mmrl.runtime.progress import display
from mmrl.sims import Observation, VectorSim

FIRST_TRAINING_SEED = 1 << 32  # held-out seeds lie below
DEMONSTRATED = 16  # actions shown after each observation; a policy takes as many as its chunk has


class EpisodeSource:
    """Start states, the tasks in turn: metadata "task" and "seed"."""

    def __init__(self, tasks: Sequence[str], size: int, first_seed: int) -> None:
        self.tasks, self.size, self.first_seed = tuple(tasks), size, first_seed

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < self.size:
            raise IndexError(index)
        task, seed = self.tasks[index % len(self.tasks)], self.first_seed + index // len(self.tasks)
        return Prompt(f"{task}-{seed}", f"{task} from seed {seed}", metadata={"task": task, "seed": seed, "kind": task})


@dataclass(frozen=True)
class RecordedEpisode:
    """One demonstrated episode: T steps."""

    name: str
    instruction: str
    images: NDArray[np.uint8]  # [T, height, width, 3], before each action; or an object that returns slices of them
    state: NDArray[np.float32]  # [T, state]
    actions: NDArray[np.float32]  # [T, action]
    cameras: tuple[str, ...] = ("camera",)  # see `Observation`
    earned: RewardsToGo | None = None  # from the first step on; its outcome is 1 for a success; None: not recorded
    terminated: bool = False  # ended by itself, not by a time limit
    final: Observation | None = None  # after the last action, one row; None: not recorded

    def observation(self, step: int) -> Observation | None:
        """Returns the observation before an action, one row, or the final one."""
        if step == len(self.actions):
            return self.final
        return Observation(self.images[step : step + 1], self.state[step : step + 1], [self.instruction], self.cameras)


@dataclass(frozen=True)
class RecordedTail(EpisodeTail):
    """A recorded episode from its step `first` on; a step is one action."""

    episode: RecordedEpisode
    first: int

    def observation(self, step: int) -> Observation | None:
        return self.episode.observation(self.first + step)


class EpisodeDemonstrations:
    """Every step of every episode, with the actions that followed: metadata "observation" and "actions", and where the
    episode says what it earned "to_go", a `RewardsToGo`, and "tail", an `EpisodeTail`."""

    def __init__(self, episodes: Sequence[RecordedEpisode]) -> None:
        self.episodes = list(episodes)
        self._steps = [(e, t) for e, episode in enumerate(self.episodes) for t in range(len(episode.actions))]

    def __len__(self) -> int:
        return len(self._steps)

    def __getitem__(self, index: int) -> Prompt:
        e, t = self._steps[index]
        episode = self.episodes[e]
        metadata: dict[str, Any] = {
            "observation": episode.observation(t),
            "actions": episode.actions[t : t + DEMONSTRATED],
        }
        if episode.earned is not None:
            rewards = episode.earned.after(t)
            metadata["to_go"] = rewards
            metadata["tail"] = RecordedTail(rewards, len(episode.actions) - t, episode.terminated, episode, t)
        return Prompt(f"{episode.name}-{t}", episode.instruction, metadata=metadata)


@dataclass(frozen=True)
class Disturbance:
    """Noise and perturbations on the expert's actions before they are executed, so that it shows how to recover (noise
    injection, DART, arXiv 1703.09327). The expert's undisturbed actions are recorded.

    noise: standard deviation of Gaussian noise. chance: that an action begins a perturbation, which puts one action
    that is uniform in [-1, 1] instead of the expert's next `length` ones.
    """

    noise: float = 0.0
    chance: float = 0.0
    length: int = 5


class Disturbed:
    """Applies a `Disturbance` to `count` environments, action by action."""

    def __init__(self, disturbance: Disturbance, count: int, rng: np.random.Generator) -> None:
        self.disturbance, self.rng = disturbance, rng
        self.left, self.instead = np.zeros(count, np.int64), np.zeros(0)

    def executed(self, wanted: NDArray[np.float32]) -> NDArray[np.float64]:
        """Returns the executed actions; they and `wanted` are [environment, 1, action]."""
        disturbance = self.disturbance
        actions = np.clip(wanted + disturbance.noise * self.rng.standard_normal(wanted.shape), -1, 1)
        if disturbance.chance == 0:
            return actions
        begins = (self.left == 0) & (self.rng.random(len(wanted)) < disturbance.chance)
        drawn = self.rng.uniform(-1, 1, wanted.shape)
        self.instead = np.where(begins[:, None, None], drawn, self.instead if self.instead.size else drawn)
        self.left[begins] = disturbance.length
        actions = np.where((self.left > 0)[:, None, None], self.instead, actions)
        self.left = np.maximum(self.left - 1, 0)
        return actions


def record_expert(
    sim: VectorSim,
    starts: Sequence[tuple[str, int]],
    *,
    disturbance: Disturbance,
    successful: bool,
    seed: int,
    executed: bool = False,
) -> list[RecordedEpisode]:
    """Records episodes of the scripted expert from `starts` (task and seed). successful: without those that failed.
    executed: the actions that were executed, in place of those that the expert wanted.

    Raises UserError where the simulator has no expert, and if no episode is left.
    """
    rng, recorded = np.random.default_rng(seed), list[RecordedEpisode]()
    with display.work("demonstrations", len(starts)) as work:
        for i in range(0, len(starts), len(sim)):
            part = starts[i : i + len(sim)]
            recorded += play_expert(
                sim, part, disturbance=disturbance, successful=successful, rng=rng, executed=executed
            )
            work.advance(min(len(sim), len(starts) - i))
    if not recorded:
        raise UserError(
            f"task.demonstrations: none of {len(starts)} scripted episodes succeeded; lower noise and perturbation"
        )
    return recorded


def play_expert(
    sim: VectorSim,
    starts: Sequence[tuple[str, int]],
    *,
    disturbance: Disturbance,
    successful: bool,
    rng: np.random.Generator,
    executed: bool,
) -> list[RecordedEpisode]:
    """Records one batch for `record_expert`: at most as many starts as the simulator has rows. It may be empty."""
    observation = sim.reset([s for _, s in starts], [t for t, _ in starts])
    instructions = observation.instructions
    steps: list[list[tuple[NDArray, NDArray, NDArray, NDArray]]] = [[] for _ in starts]
    solved, recorded, disturbed = np.zeros(len(sim), bool), [], Disturbed(disturbance, len(sim), rng)
    finals, terminated = dict[int, Observation](), np.zeros(len(sim), bool)
    while (active := sim.running).any():
        wanted = sim.expert(active)
        actions = disturbed.executed(wanted)
        moved = sim.step(actions)
        shown = actions.astype(np.float32) if executed else wanted
        for row in np.flatnonzero(active & moved.valid.any(1)).tolist():
            steps[row].append((observation.images[row], observation.state[row], shown[row, 0], moved.reward[row, 0]))
        finals |= {row: moved.observation.select([row]) for row in np.flatnonzero(active & moved.ended).tolist()}
        terminated |= moved.terminated.any(1)
        solved |= moved.success.any(1)
        observation = moved.observation
    for row, (task, start) in enumerate(starts):
        if steps[row] and (solved[row] or not successful):
            images, state, shown, rewards = (np.stack(column) for column in zip(*steps[row], strict=True))
            earned = RewardsToGo(rewards, np.arange(len(rewards)), float(solved[row]))
            name = f"{task}-{start}"
            episode = RecordedEpisode(
                name,
                instructions[row],
                images,
                state,
                shown,
                sim.cameras,
                earned,
                bool(terminated[row]),
                finals.get(row),
            )
            recorded.append(episode)
    return recorded

"""Start states of episodes, and demonstrated episodes for supervised training."""

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
MAX_CHUNK = 16  # actions after each observation of a demonstration; a policy uses as many as its chunk has


class EpisodeSource:
    """`size` start states, which cycle through `tasks`. Metadata: `task`, `seed` and `kind` (the task)."""

    def __init__(self, tasks: Sequence[str], size: int, first_seed: int) -> None:
        self.tasks, self.size, self.first_seed = tuple(tasks), size, first_seed

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Prompt:
        """Returns start state `index` as a prompt. Consecutive ones have different tasks; the seed grows after each
        round of tasks."""
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
    state: NDArray[np.float32]  # [T, state], before each action
    actions: NDArray[np.float32]  # [T, action]
    cameras: tuple[str, ...] = ("camera",)  # whose images are side by side in `images`, from left to right
    rewards: RewardsToGo | None = None  # of all steps; the outcome is 1 for a success; None: not recorded
    terminated: bool = False  # whether the episode ended by itself, not by a time limit
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
    """Prompts from demonstrated episodes: one for each step of each episode.

    Metadata: `observation`, of one environment, and `actions` [<= MAX_CHUNK, action], those that follow it. If the
    episode has rewards, also `tail`, the `EpisodeTail` from this step on.
    """

    def __init__(self, episodes: Sequence[RecordedEpisode]) -> None:
        self.episodes = list(episodes)
        self._steps = [
            (index, step) for index, episode in enumerate(self.episodes) for step in range(len(episode.actions))
        ]

    def __len__(self) -> int:
        return len(self._steps)

    def __getitem__(self, index: int) -> Prompt:
        """Returns step `index`, counted over all episodes, as a prompt: its observation, the actions that follow, and
        the rest of the episode if it has rewards."""
        episode_index, step = self._steps[index]
        episode = self.episodes[episode_index]
        metadata: dict[str, Any] = {
            "observation": episode.observation(step),
            "actions": episode.actions[step : step + MAX_CHUNK],
        }
        if episode.rewards is not None:
            rewards = episode.rewards.after(step)
            metadata["tail"] = RecordedTail(rewards, len(episode.actions) - step, episode.terminated, episode, step)
        return Prompt(f"{episode.name}-{step}", episode.instruction, metadata=metadata)


@dataclass(frozen=True)
class Disturbance:
    """Options of the disturbance of an expert's actions, so that its episodes show how to recover from mistakes (noise
    injection, DART, arXiv 1703.09327).

    noise: standard deviation of Gaussian noise on each action. probability: of an action to begin a perturbation. In a
    perturbation one random action, uniform in [-1, 1], is executed `length` times in place of the expert's actions.
    """

    noise: float = 0.0
    probability: float = 0.0
    length: int = 5

    @property
    def changes_actions(self) -> bool:
        """Returns whether the executed actions may differ from the expert's."""
        return self.noise > 0 or self.probability > 0


class ActionDisturber:
    """Applies a `Disturbance` to the actions of `num_envs` environments, step by step."""

    def __init__(self, disturbance: Disturbance, num_envs: int, rng: np.random.Generator) -> None:
        self.disturbance, self.rng = disturbance, rng
        self.remaining = np.zeros(num_envs, np.int64)  # steps until an environment's perturbation ends
        self.perturbed_actions = np.zeros(0)  # of the perturbations; empty before the first step

    def disturb(self, expert_actions: NDArray[np.float32]) -> NDArray[np.float64]:
        """Returns the actions to execute, [environment, 1, action] like `expert_actions`: the expert's with Gaussian
        noise; but where a perturbation begins at random, one random action in this and the next `length` - 1 steps."""
        disturbance = self.disturbance
        noise = self.rng.standard_normal(expert_actions.shape)
        actions = np.clip(expert_actions + disturbance.noise * noise, -1, 1)
        if disturbance.probability == 0:
            return actions
        begins = (self.remaining == 0) & (self.rng.random(len(expert_actions)) < disturbance.probability)
        sampled = self.rng.uniform(-1, 1, expert_actions.shape)
        # perturbed_actions is empty before the first call
        previous = self.perturbed_actions if self.perturbed_actions.size else sampled
        self.perturbed_actions = np.where(begins[:, None, None], sampled, previous)
        self.remaining[begins] = disturbance.length
        actions = np.where((self.remaining > 0)[:, None, None], self.perturbed_actions, actions)
        self.remaining = np.maximum(self.remaining - 1, 0)
        return actions


def record_expert(
    sim: VectorSim,
    starts: Sequence[tuple[str, int]],
    *,
    disturbance: Disturbance,
    successful_only: bool,
    seed: int,
    record_executed: bool = False,
) -> list[RecordedEpisode]:
    """Records an episode of the simulator's scripted expert from each start state.

    starts: task and seed of each start state. successful_only: leave out episodes that failed. seed: the seed of the
    disturbance. record_executed: record the disturbed actions that were executed, not the expert's.

    Raises UserError if the simulator has no expert, or if no episode is left.
    """
    rng, recorded = np.random.default_rng(seed), list[RecordedEpisode]()
    with display.work("demonstrations", len(starts)) as work:
        for i in range(0, len(starts), len(sim)):
            recorded += play_expert(
                sim,
                starts[i : i + len(sim)],
                disturbance=disturbance,
                successful_only=successful_only,
                rng=rng,
                record_executed=record_executed,
            )
            work.advance(min(len(sim), len(starts) - i))
    if not recorded:
        raise UserError(
            f"task.demonstrations: none of the expert's {len(starts)} episodes succeeded; lower "
            "task.demonstrations.noise and perturbation, or set successful to false"
        )
    return recorded


def play_expert(
    sim: VectorSim,
    starts: Sequence[tuple[str, int]],
    *,
    disturbance: Disturbance,
    successful_only: bool,
    rng: np.random.Generator,
    record_executed: bool,
) -> list[RecordedEpisode]:
    """Records one episode of the simulator's scripted expert from each of `starts` (task and seed), which are at most
    as many as the simulator has rows. Other arguments: see `record_expert`. The list may be empty."""
    observation = sim.reset([seed for _, seed in starts], [task for task, _ in starts])
    instructions = observation.instructions
    # of each row: image, state, action and reward of every step
    steps: list[list[tuple[NDArray, NDArray, NDArray, NDArray]]] = [[] for _ in starts]
    success, recorded, disturber = np.zeros(len(sim), bool), [], ActionDisturber(disturbance, len(sim), rng)
    finals, terminated = dict[int, Observation](), np.zeros(len(sim), bool)
    while (running := sim.running).any():
        expert_actions = sim.expert(running)
        executed = disturber.disturb(expert_actions)
        result = sim.step(executed)
        actions = executed.astype(np.float32) if record_executed else expert_actions
        for row in np.flatnonzero(running & result.valid.any(1)).tolist():
            steps[row].append((observation.images[row], observation.state[row], actions[row, 0], result.reward[row, 0]))
        finals |= {row: result.observation.select([row]) for row in np.flatnonzero(running & result.ended).tolist()}
        terminated |= result.terminated.any(1)
        success |= result.success.any(1)
        observation = result.observation
    for row, (task, seed) in enumerate(starts):
        if steps[row] and (success[row] or not successful_only):
            images, state, actions, rewards = (np.stack(column) for column in zip(*steps[row], strict=True))
            # Rewards belong to the executed actions; they are left out if the expert's undisturbed ones are recorded.
            has_rewards = record_executed or not disturbance.changes_actions
            to_go = RewardsToGo(rewards, np.arange(len(rewards)), float(success[row])) if has_rewards else None
            episode = RecordedEpisode(
                f"{task}-{seed}",
                instructions[row],
                images,
                state,
                actions,
                sim.cameras,
                to_go,
                bool(terminated[row]),
                finals.get(row),
            )
            recorded.append(episode)
    return recorded

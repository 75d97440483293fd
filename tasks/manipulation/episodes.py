"""Start states to play from, and demonstrations to learn from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from mmrl.sims import Observation, VectorSim
from numpy.typing import NDArray

from mmrl.errors import UserError
from mmrl.progress import display
from mmrl.rollouts import Prompt

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
class Recorded:
    """One demonstrated episode: T steps."""

    name: str
    instruction: str
    images: NDArray[np.uint8]  # [T, height, width, 3], before each action; or what gives slices of them
    state: NDArray[np.float32]  # [T, state]
    actions: NDArray[np.float32]  # [T, action]
    cameras: tuple[str, ...] = ("camera",)  # see `Observation`


class DemonstrationSource:
    """Every step of every episode, with the actions that followed: metadata "observation" and "actions"."""

    def __init__(self, episodes: Sequence[Recorded]) -> None:
        self.episodes = list(episodes)
        self._places = [(e, t) for e, episode in enumerate(self.episodes) for t in range(len(episode.actions))]

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> Prompt:
        e, t = self._places[index]
        episode = self.episodes[e]
        seen = Observation(episode.images[t : t + 1], episode.state[t : t + 1], [episode.instruction], episode.cameras)
        shown = {"observation": seen, "actions": episode.actions[t : t + DEMONSTRATED]}
        return Prompt(f"{episode.name}-{t}", episode.instruction, metadata=shown)


def record_expert(
    sim: VectorSim, starts: Sequence[tuple[str, int]], *, noise: float, successful: bool, seed: int
) -> list[Recorded]:
    """Episodes of the scripted expert from `starts` (task and seed). Executed actions are the expert's plus Gaussian
    noise of std `noise`, so that it shows how to come back; recorded are the expert's own.

    Raises UserError where the simulator has no expert, and if no episode is left.
    """
    rng, recorded = np.random.default_rng(seed), list[Recorded]()
    with display.work("demonstrations", len(starts)) as work:
        for i in range(0, len(starts), len(sim)):
            recorded += play_expert(sim, starts[i : i + len(sim)], noise=noise, successful=successful, rng=rng)
            work.advance(min(len(sim), len(starts) - i))
    if not recorded:
        raise UserError(f"task.demonstrations: none of {len(starts)} scripted episodes succeeded; lower noise")
    return recorded


def play_expert(
    sim: VectorSim, starts: Sequence[tuple[str, int]], *, noise: float, successful: bool, rng: np.random.Generator
) -> list[Recorded]:
    """As `record_expert`, of at most as many starts as the simulator has rows; there may be none."""
    observation = sim.reset([s for _, s in starts], [t for t, _ in starts])
    instructions = observation.instructions
    steps: list[list[tuple[NDArray, NDArray, NDArray]]] = [[] for _ in starts]
    solved, recorded = np.zeros(len(sim), bool), []
    while (active := sim.running).any():
        wanted = sim.expert(active)
        moved = sim.step(np.clip(wanted + noise * rng.standard_normal(wanted.shape), -1, 1))
        for row in np.flatnonzero(active & moved.valid.any(1)).tolist():
            steps[row].append((observation.images[row], observation.state[row], wanted[row, 0]))
        solved |= moved.success.any(1)
        observation = moved.observation
    for row, (task, start) in enumerate(starts):
        if steps[row] and (solved[row] or not successful):
            images, state, actions = (np.stack(column) for column in zip(*steps[row], strict=True))
            recorded.append(Recorded(f"{task}-{start}", instructions[row], images, state, actions, sim.cameras))
    return recorded

"""A ring of policy steps on disk.

A training step's episodes are one file, which is written once and never changed, so that a checkpoint refers to files
by their numbers. The oldest files leave the ring when it holds more than `size` steps; they are deleted once no
checkpoint refers to them. Observations are read from the files when they are drawn.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from mmrl.errors import UserError
from mmrl.protocols.trajectory import EpisodeTail, RewardsToGo, Trajectory
from mmrl.sims import Observation

Chosen = Literal["all", "success", "failure"]
KEY = "rollout.extras (stored_steps or action_proposals)"
SAVED = "saved.json"


@dataclass(frozen=True)
class StoredTail(EpisodeTail):
    """A stored episode from one of its policy steps on. next_observation: after the first of these steps."""

    next_observation: Observation

    def observation(self, step: int) -> Observation | None:
        return self.next_observation if step == 1 else None


@dataclass(frozen=True)
class StoredStep:
    """A stored policy step. tail: the rest of its episode, from this step on."""

    name: str
    observation: Observation  # one row, before the step
    actions: NDArray[np.float32]  # [executed, action], in the robot's units
    tail: StoredTail


class Segment:
    """The index of one file: which episodes it holds, without their observations and actions.

    lengths, success, outcome: [episode]; rewards, executed: [step], of all episodes, where executed is the number of
    actions of a step.
    """

    def __init__(self, path: Path, chosen: Chosen) -> None:
        """Raises UserError for a file that is missing or damaged."""
        self.path = path
        try:
            with safe_open(path, framework="numpy") as file:
                episodes = json.loads(file.metadata()["episodes"])
                self.terminated: list[bool] = episodes["terminated"]
                self.rewards, self.executed = file.get_tensor("rewards"), file.get_tensor("valid").sum(1)
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{KEY}: {path} cannot be read ({error}), but the run cannot be resumed without it; restore the file"
            ) from None
        self.instructions: list[str] = episodes["instructions"]
        self.cameras: tuple[str, ...] = tuple(episodes["cameras"])
        self.lengths: list[int] = episodes["lengths"]
        self.outcome: list[float] = episodes["outcome"]
        self.starts = [0, *accumulate(self.lengths)]  # first step of each episode, and the number of steps
        is_chosen = [chosen == "all" or success == (chosen == "success") for success in episodes["success"]]
        self.eligible = np.flatnonzero(np.repeat(is_chosen, self.lengths))  # indices of the steps that may be drawn

    def __len__(self) -> int:
        """Returns the number of policy steps."""
        return self.starts[-1]

    def read(self, steps: Sequence[int]) -> list[StoredStep]:
        """Reads steps by their indices in the file. An episode of T steps has T + 1 observations, so the row of a
        step's observation is its index plus the number of earlier episodes."""
        stored = []
        with safe_open(self.path, framework="numpy") as file:
            images, states = file.get_slice("images"), file.get_slice("state")
            actions = file.get_slice("actions")
            for step in steps:
                episode = bisect_right(self.starts, step) - 1
                row, executed = step + episode, int(self.executed[step])
                image, state = images[row : row + 2], states[row : row + 2]  # before and after the step
                before, after = (
                    Observation(image[i : i + 1], state[i : i + 1], [self.instructions[episode]], self.cameras)
                    for i in (0, 1)
                )
                chunk = actions[step : step + 1][0, :executed]
                stored.append(StoredStep(f"{self.path.stem}-{step}", before, chunk, self.tail(step, episode, after)))
        return stored

    def tail(self, step: int, episode: int, next_observation: Observation) -> StoredTail:
        """Returns the rest of an episode from a step on. next_observation: the observation after the step."""
        rest = slice(step, self.starts[episode + 1])
        executed = self.executed[rest]
        rewards = RewardsToGo(self.rewards[rest], executed.cumsum() - executed, self.outcome[episode])
        return StoredTail(rewards, int(executed.sum()), self.terminated[episode], next_observation)


class StepRing:
    """The last policy steps of one rank, at most `size` and at least those of the last training step."""

    def __init__(self, folder: Path, *, size: int, chosen: Chosen, checkpoints: int) -> None:
        """chosen: episodes whose steps are drawn. checkpoints: number of newest states from which `load` must still be
        able to restore the ring."""
        self.folder, self.size, self.chosen, self.checkpoints = folder, size, chosen, checkpoints
        self.segments: list[Segment] = []  # oldest first
        self.next = 0  # number of the next file

    @property
    def eligible(self) -> int:
        """Returns the number of steps that may be drawn."""
        return sum(len(segment.eligible) for segment in self.segments)

    def add(self, episodes: Sequence[Trajectory], outcomes: Sequence[float]) -> None:
        """Writes the episodes of a training step to a new file. Drops the oldest files as long as the files before the
        new one hold `size` steps or more. outcomes: the task's reward for each episode. Raises UserError if the file
        cannot be written."""
        number, self.next = self.next, self.next + 1
        if not episodes:
            return
        path = self._path(number)
        write_atomically(path, lambda partial: _write(partial, episodes, outcomes))
        self.segments.append(Segment(path, self.chosen))
        while len(self.segments) > 1 and sum(map(len, self.segments[:-1])) >= self.size:
            self.segments.pop(0)
        self._remove_unused()

    def draw(self, positions: Sequence[int]) -> list[StoredStep]:
        """Reads stored steps and returns them in the order of `positions`, their numbers among the eligible steps,
        counted from the oldest."""
        starts = [0, *accumulate(len(segment.eligible) for segment in self.segments)]
        by_segment: dict[int, list[tuple[int, int]]] = {}
        for i, position in enumerate(positions):
            number = bisect_right(starts, position) - 1
            step = int(self.segments[number].eligible[position - starts[number]])
            by_segment.setdefault(number, []).append((i, step))
        drawn: dict[int, StoredStep] = {}
        for number, rows in by_segment.items():
            steps = self.segments[number].read([step for _, step in rows])
            drawn |= {i: step for (i, _), step in zip(rows, steps, strict=True)}
        return [drawn[i] for i in range(len(positions))]

    def state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint: the numbers of the ring's files and of the next one. The files are kept
        while this is one of the newest `checkpoints` states."""
        numbers = [int(segment.path.stem) for segment in self.segments]
        saved = self._saved()
        if numbers and saved[-1:] != [numbers]:  # a new state: its numbers are stored, so that its files stay
            text = json.dumps([*saved, numbers][-self.checkpoints :])
            write_atomically(self.folder / SAVED, lambda path: path.write_text(text))
        return {"next": self.next, "files": numbers}

    def load(self, state: dict[str, Any]) -> None:
        """Restores the state of a checkpoint. Raises UserError where one of its files is missing."""
        self.next = state["next"]
        self.segments = [Segment(self._path(number), self.chosen) for number in state["files"]]

    def _saved(self) -> list[list[int]]:
        """Returns the file numbers of each of the newest states, oldest state first. They are stored on disk, since a
        resumed run may later be resumed from an older checkpoint."""
        path = self.folder / SAVED
        saved: list[list[int]] = json.loads(path.read_text()) if path.is_file() else []
        return saved

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:08}.safetensors"

    def _remove_unused(self) -> None:
        """Deletes files that neither the ring nor one of the newest checkpoints needs."""
        needed = {segment.path.name for segment in self.segments}
        needed |= {self._path(number).name for numbers in self._saved() for number in numbers}
        for path in self.folder.glob("*.safetensors"):
            if path.name not in needed:
                path.unlink(missing_ok=True)


def _write(path: Path, episodes: Sequence[Trajectory], outcomes: Sequence[float]) -> None:
    """Writes episodes to a safetensors file: arrays of all their steps, [step, ...], and properties of each
    episode as JSON."""
    properties = {
        "instructions": [episode.instruction for episode in episodes],
        "cameras": list(episodes[0].cameras),
        "lengths": [len(episode) for episode in episodes],
        "success": [episode.success for episode in episodes],
        "terminated": [episode.terminated for episode in episodes],
        "outcome": list(outcomes),
    }
    arrays = {
        name: np.concatenate([vars(episode)[name] for episode in episodes])
        for name in ("images", "state", "actions", "valid", "rewards")
    }
    save_file(arrays, path, metadata={"episodes": json.dumps(properties)})


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Writes a file under a temporary name and renames it, so that a half-written file is never read. Raises UserError
    if it cannot be written."""
    partial = path.with_suffix(".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(partial)
        os.replace(partial, path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{KEY}: {path} cannot be written: {error}") from None

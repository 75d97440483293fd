"""The interface of a simulator, and the record of its transitions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

ARRAYS = ("images", "state", "reward", "terminated", "truncated", "success", "valid")  # of a `Transition`


@dataclass
class Transition:
    """The result of C actions in each of n rows of a simulator. A row whose simulator failed has its exception in
    `errors`, and arbitrary values elsewhere."""

    images: NDArray[np.uint8]  # [n, height, width, 3], after the last executed action
    state: NDArray[np.float32]  # [n, S]
    reward: NDArray[np.float32]  # [n, C], 0 where nothing was executed
    terminated: NDArray[np.bool_]  # [n, C], True at the action that reached a terminal state
    truncated: NDArray[np.bool_]  # [n, C], True at the action that reached the time limit
    success: NDArray[np.bool_]  # [n, C], whether the task was solved after this action
    valid: NDArray[np.bool_]  # [n, C], which actions were executed: a prefix of the chunk, up to the episode's end
    errors: list[Exception | None]  # n
    restarts: int = 0  # workers that were replaced since the previous transition

    @staticmethod
    def empty(n: int, length: int, image_shape: tuple[int, int, int], state_dim: int) -> Transition:
        """Returns a transition of n rows and `length` actions that is filled with zeros: no action was executed."""
        return Transition(
            np.zeros((n, *image_shape), np.uint8),
            np.zeros((n, state_dim), np.float32),
            np.zeros((n, length), np.float32),
            np.zeros((n, length), bool),
            np.zeros((n, length), bool),
            np.zeros((n, length), bool),
            np.zeros((n, length), bool),
            [None] * n,
        )


@runtime_checkable
class NamedCameras(Protocol):
    """A simulator with several named cameras, whose images are side by side in its images, from left to right, all of
    one width."""

    cameras: tuple[str, ...]


def cameras_of(simulator: object) -> tuple[str, ...]:
    """Returns the names of a simulator's cameras; ("camera",) if it has none."""
    return tuple(simulator.cameras) if isinstance(simulator, NamedCameras) else ("camera",)


Bounds = tuple[NDArray[np.float64], NDArray[np.float64]]  # lowest and highest values, [action] each


@runtime_checkable
class BoundedActions(Protocol):
    """A simulator that declares the bounds of its actions. None stands for -1 and 1."""

    action_bounds: Bounds | None


def action_bounds_of(simulator: object) -> Bounds | None:
    """Returns the bounds of a simulator's actions; None if they are -1 and 1."""
    return simulator.action_bounds if isinstance(simulator, BoundedActions) else None


class Simulator(Protocol):
    """The interface of a simulator behind `VectorSim`, which is made by `Class(count, **options)`.

    It has `count` rows, each with an environment, numbered from 0. The same seed and task must give the same episode
    bit for bit, whatever happened in the row before. A row that fails is reported in `errors`; other rows continue.
    """

    count: int
    action_dim: int
    state_dim: int
    image_shape: tuple[int, int, int]
    tasks: tuple[str, ...]

    def reset(self, rows: Sequence[int], seeds: Sequence[int], tasks: Sequence[str]) -> Transition:
        """Starts an episode in each of `rows`. Only images, state and errors of the transition are used (C is 0)."""
        ...

    def step(self, rows: Sequence[int], actions: NDArray[np.float64]) -> Transition:
        """Executes `actions` [n, C, A], all finite, one after the other, until the row's episode ends."""
        ...

    def instruction(self, row: int) -> str:
        """Returns the instruction of a row's episode."""
        ...

    def expert(self, rows: Sequence[int], length: int) -> NDArray[np.float32]:
        """Returns the next actions of a scripted expert, [n, length, A], 0 after the episode's end. Raises UserError if
        there is no expert."""
        ...

    def close(self) -> None: ...

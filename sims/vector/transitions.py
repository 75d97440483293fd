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
    """The outcome of C actions in each of n rows of a simulator. A row whose simulator raised has its exception in
    `errors` and arbitrary values elsewhere."""

    images: NDArray[np.uint8]  # [n, height, width, 3], after the last executed action
    state: NDArray[np.float32]  # [n, S]
    reward: NDArray[np.float32]  # [n, C], 0 where nothing was executed
    terminated: NDArray[np.bool_]  # [n, C], True at the action that ended the episode for a reason of its own
    truncated: NDArray[np.bool_]  # [n, C], True at the action that used up the episode's last step
    success: NDArray[np.bool_]  # [n, C], whether the task was solved after this action
    valid: NDArray[np.bool_]  # [n, C], which actions were executed: a prefix of the chunk, up to the episode's end
    errors: list[Exception | None]  # n
    restarts: int = 0  # workers that had to be replaced since the transition before

    @staticmethod
    def empty(n: int, length: int, image_shape: tuple[int, int, int], state_dim: int) -> Transition:
        """Returns a transition of n rows and chunks of `length` actions, filled with zeros, in which nothing was
        executed."""
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
    """A simulator that names the cameras whose images stand side by side in its images, all of one width, from the
    left."""

    cameras: tuple[str, ...]


def cameras_of(simulator: object) -> tuple[str, ...]:
    """Returns the names of a simulator's cameras; ("camera",) for one that does not name them."""
    return tuple(simulator.cameras) if isinstance(simulator, NamedCameras) else ("camera",)


Bounds = tuple[NDArray[np.float64], NDArray[np.float64]]  # lowest and highest, [action] each


@runtime_checkable
class BoundedActions(Protocol):
    """A simulator whose actions have bounds of their own; None: they are -1 and 1, as of any other."""

    action_bounds: Bounds | None


def action_bounds_of(simulator: object) -> Bounds | None:
    """Returns the bounds of a simulator's actions; None for one that takes numbers from -1 to 1."""
    return simulator.action_bounds if isinstance(simulator, BoundedActions) else None


class Simulator(Protocol):
    """The interface of a simulator behind `VectorSim`; made by `Class(count, **options)`.

    Rows are numbered 0 to count - 1 and live until `close`. The same seed and task must give the same episode bit for
    bit, whatever happened in the row before. A row that fails is reported in `errors`; the other rows go on.
    """

    count: int
    action_dim: int
    state_dim: int
    image_shape: tuple[int, int, int]
    tasks: tuple[str, ...]

    def reset(self, rows: Sequence[int], seeds: Sequence[int], tasks: Sequence[str]) -> Transition:
        """Starts an episode in each of `rows`. The transition has C = 0: only images, state and errors count."""
        ...

    def step(self, rows: Sequence[int], actions: NDArray[np.float64]) -> Transition:
        """Executes `actions` [n, C, A], all finite, one after the other until the row's episode ends."""
        ...

    def instruction(self, row: int) -> str: ...

    def expert(self, rows: Sequence[int], length: int) -> NDArray[np.float32]:
        """Returns the next actions [n, length, A] of a scripted expert, 0 after the episode's end. Raises UserError if
        there is none."""
        ...

    def close(self) -> None: ...

"""A simulator that computes nothing: episodes of `length` actions, black images. For `scale.py` and `workers.py`."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mmrl.sims.vector.transitions import Transition


class PretendSimulator:
    action_dim, state_dim, tasks = 7, 8, ("pretend",)

    def __init__(self, count: int, length: int = 40, image: int = 64, wait: float = 0.0) -> None:
        """wait: seconds that a step of a chunk takes."""
        self.count, self.length, self.image_shape, self.wait = count, length, (image, image, 3), wait
        self.done = np.zeros(count, np.int64)

    def reset(self, rows: Sequence[int], seeds: Sequence[int], tasks: Sequence[str]) -> Transition:
        self.done[list(rows)] = 0
        return Transition.empty(len(rows), 0, self.image_shape, self.state_dim)

    def step(self, rows: Sequence[int], actions: NDArray[np.float64]) -> Transition:
        time.sleep(self.wait)
        out = Transition.empty(len(rows), actions.shape[1], self.image_shape, self.state_dim)
        places = self.done[list(rows)][:, None] + np.arange(actions.shape[1])
        out.valid[:] = places < self.length
        out.truncated[:] = places == self.length - 1
        self.done[list(rows)] += actions.shape[1]
        return out

    def instruction(self, row: int) -> str:
        return "do nothing"

    def expert(self, rows: Sequence[int], length: int) -> NDArray[np.float32]:
        return np.zeros((len(rows), length, self.action_dim), np.float32)

    def close(self) -> None:
        pass

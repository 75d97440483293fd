"""The environments in the rows of a simulator that steps them one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from mmrl.sims.vector.transitions import Transition

T = TypeVar("T")


class EnvironmentRows(Generic[T]):
    """An environment or nothing in each of `count` rows. One that fails is removed from its row, for its state is
    undefined."""

    def __init__(self, count: int) -> None:
        self._playing: list[T | None] = [None] * count

    def __getitem__(self, row: int) -> T:
        """Returns the environment of a row. Raises RuntimeError where there is none."""
        playing = self._playing[row]
        if playing is None:
            raise RuntimeError(f"row {row} has no episode")
        return playing

    def __setitem__(self, row: int, playing: T) -> None:
        self._playing[row] = playing

    def get(self, row: int) -> T | None:
        return self._playing[row]

    def each(self, rows: Sequence[int], out: Transition, act: Callable[[int, int], None]) -> Transition:
        """Calls act(i, row) for each row and returns `out`; an exception of a row becomes its error there."""
        for i, row in enumerate(rows):
            try:
                act(i, row)
            except Exception as error:  # of one row; the others go on, and `VectorSim` counts it
                self._playing[row], out.errors[i] = None, error
        return out

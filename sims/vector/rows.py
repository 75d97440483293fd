"""The environments in the rows of a simulator that steps them one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from mmrl.sims.vector.transitions import Transition

T = TypeVar("T")


class EnvironmentRows(Generic[T]):
    """The environments in `count` rows; a row may be empty. An environment that raises is removed from its row, since
    its state is undefined."""

    def __init__(self, count: int) -> None:
        self._environments: list[T | None] = [None] * count

    def __getitem__(self, row: int) -> T:
        """Returns the environment of a row. Raises RuntimeError if there is none."""
        environment = self._environments[row]
        if environment is None:
            raise RuntimeError(f"row {row} has no episode")
        return environment

    def __setitem__(self, row: int, environment: T) -> None:
        self._environments[row] = environment

    def get(self, row: int) -> T | None:
        return self._environments[row]

    def each(self, rows: Sequence[int], out: Transition, act: Callable[[int, int], None]) -> Transition:
        """Calls act(i, row) for the i-th of `rows` and returns `out`. An exception becomes the row's error
        in `out`, and the row loses its environment."""
        for i, row in enumerate(rows):
            try:
                act(i, row)
            except Exception as error:  # the other rows continue; `VectorSim` reports the error
                self._environments[row], out.errors[i] = None, error
        return out

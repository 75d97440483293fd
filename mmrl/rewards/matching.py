"""Matchings between two sets, such as predicted and gold boxes, by a table of gains."""

from __future__ import annotations

from collections.abc import Sequence

Table = Sequence[Sequence[float]]  # [row][column], any number of rows and columns


def best_assignment(gains: Table) -> list[tuple[int, int]]:
    """Returns the pairs (row, column), ordered by row, of the one-to-one matching with the largest sum of gains
    (Hungarian)."""
    from scipy.optimize import (
        linear_sum_assignment,
    )  # not above: the import takes half a second, also in jobs without this reward

    if not gains:
        return []
    rows, columns = linear_sum_assignment(gains, maximize=True)
    return list(zip(rows.tolist(), columns.tolist(), strict=True))


def soft_assignment(gains: Table, epsilon: float, rounds: int = 200) -> list[list[float]]:
    """Returns matching weights [row][column] by Sinkhorn's algorithm (entropic optimal transport).

    gains: at most 1. The smaller side is padded with gains of 0; then rows and columns of exp(gains / epsilon) are
    scaled in turn until each sums to 1. As epsilon falls to 0 this becomes `best_assignment`.
    """
    import numpy as np

    table = np.asarray(gains, dtype=float)
    rows, columns = table.shape
    full = np.zeros((max(rows, columns),) * 2)
    full[:rows, :columns] = table
    # Subtracting 1 only scales the weights, so that none exceeds 1. exp(-600) is the smallest weight: a row of zeros
    # could not be scaled to a sum of 1.
    weights = np.exp(np.maximum((full - 1) / epsilon, -600.0))
    for _ in range(rounds):
        weights = weights / weights.sum(1, keepdims=True)
        weights = weights / weights.sum(0, keepdims=True)
    return weights[:rows, :columns].tolist()

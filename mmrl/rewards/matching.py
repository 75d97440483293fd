"""Which of several things belongs to which of others."""

from __future__ import annotations

import math
from collections.abc import Sequence

Table = Sequence[Sequence[float]]  # [row][column], any number of either


def best_assignment(gains: Table) -> list[tuple[int, int]]:
    """Pairs (row, column), each row and column at most once and as many as there can be, with the largest sum of gains:
    the Hungarian algorithm with shortest augmenting paths, O(n^3)."""
    rows, columns = len(gains), len(gains[0]) if gains else 0
    if not rows or not columns:
        return []
    if rows > columns:
        flipped = [[gains[r][c] for r in range(rows)] for c in range(columns)]
        return sorted((row, column) for column, row in best_assignment(flipped))
    up, down = [0.0] * (rows + 1), [0.0] * (columns + 1)
    owner, way = [0] * (columns + 1), [0] * (columns + 1)  # column 0 is where a path begins
    for row in range(1, rows + 1):
        owner[0], here = row, 0
        least, used = [math.inf] * (columns + 1), [False] * (columns + 1)
        while owner[here]:
            used[here], step, there = True, math.inf, 0
            for column in range(1, columns + 1):
                if not used[column]:
                    cost = -gains[owner[here] - 1][column - 1] - up[owner[here]] - down[column]
                    if cost < least[column]:
                        least[column], way[column] = cost, here
                    if least[column] < step:
                        step, there = least[column], column
            for column in range(columns + 1):
                if used[column]:
                    up[owner[column]] += step
                    down[column] -= step
                else:
                    least[column] -= step
            here = there
        while here:
            owner[here], here = owner[way[here]], way[here]
    return sorted((owner[column] - 1, column - 1) for column in range(1, columns + 1) if owner[column])


def soft_assignment(gains: Table, epsilon: float, rounds: int = 200) -> list[list[float]]:
    """Weights [row][column] of Sinkhorn's algorithm: rows and columns of exp(gains / epsilon) are scaled in turn until
    each sums to 1, after the smaller side was filled up with things that gain nothing. As epsilon falls to 0 this is
    `best_assignment`. gains: at most 1."""
    import numpy as np

    table = np.asarray(gains, dtype=float)
    rows, columns = table.shape
    full = np.zeros((max(rows, columns),) * 2)
    full[:rows, :columns] = table
    weights = np.exp(np.maximum((full - 1) / epsilon, -600.0))
    for _ in range(rounds):
        weights = weights / weights.sum(1, keepdims=True)
        weights = weights / weights.sum(0, keepdims=True)
    return weights[:rows, :columns].tolist()

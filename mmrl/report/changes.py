"""Finds the step at which the level of a metric changes for good."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median

from mmrl.report.records import Series

LEAST = 3  # values on each side of a change: fewer are a peak, or a start
EDGE, INSIDE = 8, 48  # candidate cuts next to each end, and between them


@dataclass(frozen=True)
class Change:
    """A metric's level before and from `step` on, medians both."""

    before: float
    after: float
    step: int

    @property
    def factor(self) -> float:
        return self.after / self.before if self.before > 0 else 0.0


def turn(series: Series, *, factors: bool = False) -> Change | None:
    """Returns the cut of a series into two levels with the least sum of absolute distances of its finite values from
    their level; None for too few values. factors: use logarithms, of positive values alone."""
    points = [(s, v) for s, v in zip(series.steps, series.values, strict=True) if math.isfinite(v)]
    if factors:
        points = [(s, math.log(v)) for s, v in points if v > 0]
    values = [value for _, value in points]
    cuts = cut_positions(len(values))
    if not cuts:
        return None
    best = min(cuts, key=lambda cut: spread(values[:cut]) + spread(values[cut:]))
    before, after = median(values[:best]), median(values[best:])
    return Change(*((math.exp(before), math.exp(after)) if factors else (before, after)), points[best][0])


def spread(values: list[float]) -> float:
    middle = median(values)
    return sum(abs(value - middle) for value in values)


def cut_positions(count: int) -> list[int]:
    """Returns candidate positions for cutting `count` values in two: all next to the ends, some in between."""
    first, last = LEAST, count - LEAST
    if last < first:
        return []
    ends = {*range(first, first + EDGE), *range(last - EDGE + 1, last + 1)}
    between = {first + (last - first) * i // INSIDE for i in range(INSIDE + 1)}
    return sorted(position for position in ends | between if first <= position <= last)

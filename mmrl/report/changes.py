"""Finds the step at which the level of a metric changes for good."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median

from mmrl.report.records import Series

MIN_VALUES = 3  # values on each side of a change; fewer are a peak
CUTS_AT_ENDS, CUTS_INSIDE = 8, 48  # numbers of candidate cuts next to each end, and between them


@dataclass(frozen=True)
class Change:
    """A change of a metric's level. before, after: the medians of the values before `step` and from `step` on."""

    before: float
    after: float
    step: int

    @property
    def factor(self) -> float:
        return self.after / self.before if self.before > 0 else 0.0


def find_change(series: Series, *, factors: bool = False) -> Change | None:
    """Returns the cut of a series into two levels that minimises the sum of absolute deviations from their medians.

    Returns None if there are too few finite values. factors: whether to compare logarithms, of positive values only.
    """
    points = [(s, v) for s, v in zip(series.steps, series.values, strict=True) if math.isfinite(v)]
    if factors:
        points = [(s, math.log(v)) for s, v in points if v > 0]
    values = [value for _, value in points]
    cuts = cut_positions(len(values))
    if not cuts:
        return None
    best = min(cuts, key=lambda cut: absolute_deviation(values[:cut]) + absolute_deviation(values[cut:]))
    before, after = median(values[:best]), median(values[best:])
    # points[best][0]: the step of the first value after the cut
    return Change(*((math.exp(before), math.exp(after)) if factors else (before, after)), points[best][0])


def absolute_deviation(values: list[float]) -> float:
    """Returns the sum of absolute deviations from the median."""
    middle = median(values)
    return sum(abs(value - middle) for value in values)


def cut_positions(count: int) -> list[int]:
    """Returns candidate positions for cutting `count` values in two: all near the ends, evenly spaced ones between."""
    first, last = MIN_VALUES, count - MIN_VALUES
    if last < first:
        return []
    ends = {*range(first, first + CUTS_AT_ENDS), *range(last - CUTS_AT_ENDS + 1, last + 1)}
    between = {first + (last - first) * i // CUTS_INSIDE for i in range(CUTS_INSIDE + 1)}
    return sorted(position for position in ends | between if first <= position <= last)

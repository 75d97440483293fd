"""Where the course of a metric changes for good, whenever in a run that is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median

from mmrl.report.records import Series

LEAST = 3  # values on each side of a change: fewer are a peak, or a start
EDGE, INSIDE = 8, 48  # places that are looked at next to both ends, and between them


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
    """The cut of a course into two levels that its finite values are nearest to, by the sum of absolute distances; None
    where there are too few of them. factors: of positive values alone, by their logarithms."""
    known = [(s, v) for s, v in zip(series.steps, series.values, strict=True) if math.isfinite(v)]
    if factors:
        known = [(s, math.log(v)) for s, v in known if v > 0]
    values = [value for _, value in known]
    cuts = places(len(values))
    if not cuts:
        return None
    best = min(cuts, key=lambda place: spread(values[:place]) + spread(values[place:]))
    before, after = median(values[:best]), median(values[best:])
    return Change(*((math.exp(before), math.exp(after)) if factors else (before, after)), known[best][0])


def spread(values: list[float]) -> float:
    middle = median(values)
    return sum(abs(value - middle) for value in values)


def places(count: int) -> list[int]:
    """Where so many values may be cut in two: everywhere next to the ends, and at some places in between."""
    first, last = LEAST, count - LEAST
    if last < first:
        return []
    ends = {*range(first, first + EDGE), *range(last - EDGE + 1, last + 1)}
    between = {first + (last - first) * i // INSIDE for i in range(INSIDE + 1)}
    return sorted(place for place in ends | between if first <= place <= last)

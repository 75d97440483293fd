"""Values of spans at the door: what a reward returned is checked, kept with its sample, and becomes one number."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from operator import index
from typing import Any, Literal

from mmrl.rewards.services.failures import Failure, Failures
from mmrl.rewards.types import Score, numbers
from mmrl.rollouts import Sample, Spans

Total = Literal["sum", "mean", "min"]
UNITS = ("characters", "turns", "decisions")


def checked(values: Any, samples: Sequence[Sample], failures: Failures) -> list[Score | Spans]:
    """Returns a number, None or spans for each sample. Spans that are not in order, out of bounds or not finite cost
    their sample, which is counted in `failures`. Raises UserError as `mmrl.rewards.types.numbers`."""
    if not isinstance(values, list):
        return list(numbers(values, len(samples)))
    plain = numbers([None if isinstance(value, Spans) else value for value in values], len(samples))
    return [
        _at_the_door(value, sample, failures) if isinstance(value, Spans) else number
        for value, number, sample in zip(values, plain, samples, strict=True)
    ]


def entered(values: Iterable[Score | Spans], samples: Sequence[Sample], name: str, total: Total) -> list[Score]:
    """Keeps spans in `Sample.spans` under the column `name`, if there are none. Returns the number of each sample."""
    scores: list[Score] = []
    for value, sample in zip(values, samples, strict=True):
        if isinstance(value, Spans):
            # Rewards come before the accuracy, whose column may be of the same name.
            sample.spans.setdefault(name, value)
        scores.append(total_of(value, total) if isinstance(value, Spans) else value)
    return scores


def total_of(spans: Spans, total: Total) -> Score:
    """Returns the number of the whole rollout; None where there are neither values nor a total."""
    values = [value for _, _, value in spans.values]
    if spans.total is not None or not values:
        return spans.total
    return min(values) if total == "min" else sum(values) / (len(values) if total == "mean" else 1)


def plain(spans: Spans) -> Spans:
    """Returns spans with Python's own numbers. Raises ValueError for what are not triples of two integers and a number,
    for an unknown unit and for numbers that are not finite."""
    if spans.unit not in UNITS:
        raise ValueError(f"the unit of spans must be one of {', '.join(UNITS)}, not {spans.unit!r}")
    try:
        values = tuple((index(begin), index(end), float(value)) for begin, end, value in spans.values)
        total = None if spans.total is None else float(spans.total)
    except (TypeError, ValueError) as error:
        text = " ".join(str(error).split())
        raise ValueError(f"spans are (begin, end, value), two integers and a number: {text}") from None
    for number, (_, _, value) in enumerate(values):
        if not math.isfinite(value):
            raise ValueError(f"the value of span {number} is {value}")
    if total is not None and not math.isfinite(total):
        raise ValueError(f"the total of its spans is {total}")
    return Spans(values, total, spans.unit)


def _at_the_door(spans: Spans, sample: Sample, failures: Failures) -> Score | Spans:
    """Returns the spans with plain numbers, or records the sample as lost where they are not valid."""
    try:
        numbers_only = plain(spans)
        _check_bounds(numbers_only, sample)
    except ValueError as error:
        return failures.lost(sample, Failure("error", str(error)))
    return numbers_only


def _check_bounds(spans: Spans, sample: Sample) -> None:
    """Raises ValueError for spans that are empty, overlap, go back or end after the response."""
    length, before = _length(spans, sample), 0
    for number, (begin, end, _) in enumerate(spans.values):
        if begin >= end:
            raise ValueError(f"span {number}, {begin} to {end}, is empty")
        if begin < before:
            raise ValueError(f"span {number}, {begin} to {end}, begins before {before}, where the one before it ends")
        if end > length:
            raise ValueError(f"span {number}, {begin} to {end}, ends after the response's {length:g} {spans.unit}")
        before = end


def _length(spans: Spans, sample: Sample) -> float:
    """Returns how much of the unit there is; infinity for decisions, which only the policy counts."""
    if spans.unit == "characters":
        return len(sample.response)
    if spans.unit == "decisions":
        return math.inf
    return 0 if sample.conversation is None else len(sample.conversation.turns)

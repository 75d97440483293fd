"""Spans: values of parts of a response, such as its steps. Checks the spans that a reward returned, stores them in the
sample, and reduces them to one number."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from operator import index
from typing import Any, Literal

from mmrl.rewards.services.failures import Failure, Failures
from mmrl.rewards.types import Score, to_scores
from mmrl.rollouts import Sample, Spans

Total = Literal["sum", "mean", "min"]
UNITS = ("characters", "turns", "decisions", "policy_steps")


def check_values(values: Any, samples: Sequence[Sample], failures: Failures) -> list[Score | Spans]:
    """Checks what a reward returned, and returns a number, None or spans for each sample.

    Spans that are out of order, out of bounds or not finite fail their sample, which is counted in `failures`. Raises
    UserError like `mmrl.rewards.types.to_scores`.
    """
    if not isinstance(values, list):  # such as a tensor, which holds no spans
        return list(to_scores(values, len(samples)))
    scores = to_scores([None if isinstance(value, Spans) else value for value in values], len(samples))
    return [
        _check_spans(value, sample, failures) if isinstance(value, Spans) else number
        for value, number, sample in zip(values, scores, samples, strict=True)
    ]


def store_spans(values: Iterable[Score | Spans], samples: Sequence[Sample], name: str, total: Total) -> list[Score]:
    """Stores spans in `Sample.spans` under the column `name`, unless that column has spans, and returns the score of
    each sample. total: how spans without a total are reduced."""
    scores: list[Score] = []
    for value, sample in zip(values, samples, strict=True):
        if isinstance(value, Spans):
            # The rewards are stored before the accuracy, whose column may have the same name.
            sample.spans.setdefault(name, value)
        scores.append(total_of(value, total) if isinstance(value, Spans) else value)
    return scores


def total_of(spans: Spans, total: Total) -> Score:
    """Reduces the spans of a response to one number; None if there are neither values nor a total."""
    values = [value for _, _, value in spans.values]
    if spans.total is not None or not values:
        return spans.total
    return min(values) if total == "min" else sum(values) / (len(values) if total == "mean" else 1)


def validate_spans(spans: Spans) -> Spans:
    """Returns spans whose numbers are Python's int and float.

    Raises ValueError unless they are triples of two integers and a finite number, with a known unit.
    """
    if spans.unit not in UNITS:
        raise ValueError(f"the unit of spans must be one of {', '.join(UNITS)}, not {spans.unit!r}")
    try:
        values = tuple((index(begin), index(end), float(value)) for begin, end, value in spans.values)
        total = None if spans.total is None else float(spans.total)
    except (TypeError, ValueError) as error:
        text = " ".join(str(error).split())
        raise ValueError(f"each span must be (begin, end, value), two integers and a number: {text}") from None
    for number, (_, _, value) in enumerate(values):
        if not math.isfinite(value):
            raise ValueError(f"the value of span {number} is {value}, not a finite number")
    if total is not None and not math.isfinite(total):
        raise ValueError(f"the total of its spans is {total}, not a finite number")
    return Spans(values, total, spans.unit)


def _check_spans(spans: Spans, sample: Sample, failures: Failures) -> Score | Spans:
    """Returns valid spans, with Python's int and float. If they are not valid, counts the sample as failed and returns
    its score."""
    try:
        valid = validate_spans(spans)
        _check_bounds(valid, sample)
    except ValueError as error:
        return failures.record(sample, Failure("error", str(error)))
    return valid


def _check_bounds(spans: Spans, sample: Sample) -> None:
    """Raises ValueError for spans that are empty, overlap, are out of order, or end after the response."""
    length, previous_end = _length(spans, sample), 0
    for number, (begin, end, _) in enumerate(spans.values):
        if begin >= end:
            raise ValueError(f"span {number}, {begin} to {end}, is empty")
        if begin < previous_end:
            raise ValueError(
                f"span {number}, {begin} to {end}, begins before {previous_end}, the end of the previous span"
            )
        if end > length:
            raise ValueError(f"span {number}, {begin} to {end}, ends after the response's {length:g} {spans.unit}")
        previous_end = end


def _length(spans: Spans, sample: Sample) -> float:
    """Returns the length of the response in the spans' unit; infinity for decisions and policy steps, whose number only
    the policy knows."""
    if spans.unit == "characters":
        return len(sample.response)
    if spans.unit in ("decisions", "policy_steps"):
        return math.inf
    return 0 if sample.conversation is None else len(sample.conversation.turns)

"""A process reward: a response is split into steps, and a scorer gives each step a value."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Literal

from mmrl.rewards.types import Reward, load_object
from mmrl.rollouts import Sample, Spans

Split = Literal["newline", "sentence", "separator"]
StepScorer = Callable[[Sample, list[str]], Sequence[float]]
_MARKS = r".!?\u2026"  # marks that end a sentence
_FULL_STOPS = r"\u3002\uff01\uff1f"  # Chinese marks, which no space follows
_ENDS = {
    "newline": r"\n+",
    "sentence": rf"(?<![{_MARKS}])[{_MARKS}]++[\"'\u201d\u2019)\]]*+(?:\s++|\Z)|[{_FULL_STOPS}]++\s*+|\n{{2,}}\s*+",
}


def process(
    *, scorer: str, options: dict[str, Any] | None = None, split: Split = "newline", separator: str | None = None
) -> Reward:
    """Builds a process reward: values of the steps of a response, as spans of its characters.

    scorer: module:function, called as f(sample, steps, **options) with the texts of the steps; or module:Class, called
    as Class(**options), whose object is called as f(sample, steps). It returns a number for each step. split: a step
    ends with a "newline", a "sentence" (a mark and a space after it, or a Chinese full stop), or a "separator", the
    text `separator`. Blank parts are no steps. Raises ValueError for an unknown split, and unless a separator and
    split=separator are given together.
    """
    if split not in ("newline", "sentence", "separator"):
        raise ValueError(f"split must be newline, sentence or separator, not {split!r}")
    if split == "separator" and not separator:
        raise ValueError("split: separator needs the option separator, the text that ends a step")
    if split != "separator" and separator:
        raise ValueError(f"separator is for split: separator, but split is {split}; remove separator, or set split")
    score = _scorer(scorer, options or {})
    ending = re.compile(re.escape(separator) if separator else _ENDS[split])

    def reward(sample: Sample) -> Spans:
        """Returns the steps of a response as spans with the scorer's values."""
        bounds = steps(sample.response, ending)
        values = list(score(sample, [sample.response[begin:end] for begin, end in bounds]))
        if len(values) != len(bounds):
            raise ValueError(
                f"scorer {scorer} returned {len(values)} values for {len(bounds)} steps; it must return one per step"
            )
        return Spans([(begin, end, value) for (begin, end), value in zip(bounds, values, strict=True)])

    return reward


def steps(text: str, ending: re.Pattern[str]) -> list[tuple[int, int]]:
    """Returns (begin, end) of each step of a string, including the text that ends it; blank steps are left out."""
    edges = [0, *(match.end() for match in ending.finditer(text)), len(text)]
    return [(begin, end) for begin, end in pairwise(edges) if text[begin:end].strip()]


def _scorer(name: str, options: dict[str, Any]) -> StepScorer:
    """Returns the function that scores steps. name: module:function, called with `options` as further arguments; or
    module:Class, whose object Class(**options) is returned. Raises ValueError for anything else."""
    target = load_object(name)
    if not callable(target):
        raise ValueError(f"scorer {name!r} is neither a function nor a class, but {type(target).__name__}")
    if not inspect.isclass(target):
        return lambda sample, texts: target(sample, texts, **options)
    instance: Any = target(**options)
    if not callable(instance):
        raise ValueError(f"scorer {name!r}: its object cannot be called with a sample and its steps; define __call__")
    scorer: StepScorer = instance
    return scorer

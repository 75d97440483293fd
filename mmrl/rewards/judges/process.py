"""A process reward: a response is split into steps, and a scorer gives each a value."""

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
_MARKS = r".!?\u2026"  # of the ends of sentences
_FULL_STOPS = r"\u3002\uff01\uff1f"  # of Chinese, which no space follows
_ENDS = {
    "newline": r"\n+",
    "sentence": rf"(?<![{_MARKS}])[{_MARKS}]++[\"'\u201d\u2019)\]]*+(?:\s++|\Z)|[{_FULL_STOPS}]++\s*+|\n{{2,}}\s*+",
}


def process(
    *, scorer: str, options: dict[str, Any] | None = None, split: Split = "newline", separator: str | None = None
) -> Reward:
    """The values of the steps of a response, as spans of its characters.

    scorer: module:function, called as f(sample, steps, **options) with the texts of the steps, or module:Class, which
    is called as Class(**options) and its object likewise without options; either returns a number a step. split: a
    step ends with a "newline", a "sentence" (a mark and a space behind it, or a full stop of Chinese), or with the text
    `separator`. What is blank is not a step. Raises ValueError for an unknown split, and a separator without
    split=separator or the reverse.
    """
    if split not in ("newline", "sentence", "separator"):
        raise ValueError(f"split must be newline, sentence or separator, not {split!r}")
    if (split == "separator") != bool(separator):
        raise ValueError("split: separator and the text `separator`, which ends a step, go together")
    score = _scorer(scorer, options or {})
    ending = re.compile(re.escape(separator) if separator else _ENDS[split])

    def reward(sample: Sample) -> Spans:
        bounds = steps(sample.response, ending)
        values = list(score(sample, [sample.response[begin:end] for begin, end in bounds]))
        if len(values) != len(bounds):
            raise ValueError(f"{scorer} gave {len(values)} values for {len(bounds)} steps")
        return Spans([(begin, end, value) for (begin, end), value in zip(bounds, values, strict=True)])

    return reward


def steps(text: str, ending: re.Pattern[str]) -> list[tuple[int, int]]:
    """Returns begin and end of each step of a string, its ending included, without those that are blank."""
    edges = [0, *(match.end() for match in ending.finditer(text)), len(text)]
    return [(begin, end) for begin, end in pairwise(edges) if text[begin:end].strip()]


def _scorer(name: str, options: dict[str, Any]) -> StepScorer:
    """Returns the function that scores the steps of a response: the one named, or an instance of the class named.
    Raises ValueError for anything else."""
    target = load_object(name)
    if not callable(target):
        raise ValueError(f"scorer {name!r} is neither a function nor a class")
    if not inspect.isclass(target):
        return lambda sample, texts: target(sample, texts, **options)
    instance: Any = target(**options)
    if not callable(instance):
        raise ValueError(f"scorer {name!r} makes an object that can not be called with a sample and its steps")
    scorer: StepScorer = instance
    return scorer

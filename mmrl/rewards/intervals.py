"""Intervals of time in clips."""

from __future__ import annotations

import re
from collections.abc import Sequence

from mmrl.rewards.types import Reward
from mmrl.rewards.verifiers import extract_answer
from mmrl.rollouts import Sample

NUMBER = re.compile(r"\d+(?:\.\d+)?")


def interval_iou(*, least: float = 0.0) -> Reward:
    """Intersection over union, 0 to 1, of the last two numbers of the answer, such as "from 3.5 to 7", and the gold
    interval [begin, end], both in seconds; below `least` it is 0. No two numbers, or an end that is not behind the
    beginning, get 0; None where the gold answer is no interval. The temporal grounding reward of VideoChat-R1."""
    if not 0 <= least < 1:
        raise ValueError(f"least must lie in 0 .. 1, below 1, not {least}")

    def reward(sample: Sample) -> float | None:
        gold = sample.prompt.answer
        if not _rises(gold):
            return None
        said = [float(number) for number in NUMBER.findall(extract_answer(sample.response))][-2:]
        if not _rises(said):
            return 0.0
        shared = max(0.0, min(said[1], gold[1]) - max(said[0], gold[0]))
        found = shared / (said[1] - said[0] + gold[1] - gold[0] - shared)
        return found if found >= least else 0.0

    return reward


def _rises(value: object) -> bool:
    """Whether it is two numbers, the second above the first."""
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        return False
    return all(isinstance(number, int | float) for number in value) and value[0] < value[1]

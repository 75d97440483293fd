"""Intervals of time in videos."""

from __future__ import annotations

from collections.abc import Sequence

from mmrl.rewards.parsing.responses import extract_answer, full_response
from mmrl.rewards.parsing.times import gold_times, times_in
from mmrl.rewards.types import Reward
from mmrl.rollouts import Sample


def interval_iou(*, least: float = 0.0) -> Reward:
    """Intersection over union, 0 to 1, of the last two times of the answer, such as "from 3.5 to 7" or "1:03 - 2:10",
    and the gold interval, [begin, end] in seconds or in the same forms; below `least` it is 0. No two times, or an end
    that is not behind the beginning, get 0; None where the gold answer is not an interval. The temporal grounding
    reward of VideoChat-R1. Forms of times: see `mmrl.rewards.parsing.times`."""
    if not 0 <= least < 1:
        raise ValueError(f"least must lie in 0 .. 1, below 1, not {least}")

    def reward(sample: Sample) -> float | None:
        gold = gold_times(sample.prompt.answer)
        if len(gold) != 2 or not _rises(gold):
            return None
        interval = times_in(extract_answer(full_response(sample)))[-2:]
        if not _rises(interval):
            return 0.0
        shared = max(0.0, min(interval[1], gold[1]) - max(interval[0], gold[0]))
        overlap = shared / (interval[1] - interval[0] + gold[1] - gold[0] - shared)
        return overlap if overlap >= least else 0.0

    return reward


def _rises(times: Sequence[float]) -> bool:
    return len(times) == 2 and times[0] < times[1]

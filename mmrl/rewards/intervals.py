"""A reward for time intervals in videos."""

from __future__ import annotations

from collections.abc import Sequence

from mmrl.rewards.parsing.responses import extract_answer, full_response
from mmrl.rewards.parsing.times import gold_times, parse_times
from mmrl.rewards.types import Reward
from mmrl.rollouts import Sample


def interval_iou(*, least: float = 0.0) -> Reward:
    """Builds a reward: the intersection over union, 0 to 1, of the answer's time interval and the gold interval.

    The interval is the last two times of the answer, such as "from 3.5 to 7" or "1:03 - 2:10" (forms:
    `mmrl.rewards.parsing.times`). gold: [begin, end] in seconds, or in the same forms. least: a smaller IoU counts as
    0. An answer without two times, the earlier one first, gets 0; the reward is None if the gold answer is not an
    interval. This is the temporal grounding reward of VideoChat-R1.
    """
    if not 0 <= least < 1:
        raise ValueError(f"least must be at least 0 and below 1, not {least}")

    def reward(sample: Sample) -> float | None:
        """Returns the IoU of the answer's last two times and the gold interval; None if the gold answer is no
        interval."""
        gold = gold_times(sample.prompt.answer)
        if len(gold) != 2 or not _is_interval(gold):
            return None
        interval = parse_times(extract_answer(full_response(sample)))[-2:]
        if not _is_interval(interval):
            return 0.0
        intersection = max(0.0, min(interval[1], gold[1]) - max(interval[0], gold[0]))
        iou = intersection / (interval[1] - interval[0] + gold[1] - gold[0] - intersection)
        return iou if iou >= least else 0.0

    return reward


def _is_interval(times: Sequence[float]) -> bool:
    """Returns whether `times` are two times, the earlier one first."""
    return len(times) == 2 and times[0] < times[1]

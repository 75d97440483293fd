"""Warnings about ranges of actions: statistics that do not fit the simulator or the demonstrations."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from mmrl.policies.vla.heads.codec import ActionNormalizer, ActionStatistics
from mmrl.sims.vector.transitions import Bounds

MARGIN = 0.05  # quantiles may lie beyond the simulator's range by this share of it
# Largest distance of demonstrated numbers from the center of the statistics, in half ranges, without a warning.
MAX_DISTANCE_IF_CLIPPED, MAX_DISTANCE = 1.1, 5.0
MAX_SHARE = 0.05  # share of numbers that may lie farther away; 1 % and 99 % quantiles leave 2 % outside


def check_statistics(path: str, statistics: ActionStatistics, bounds: Bounds | None) -> Iterator[str]:
    """Yields a warning for action dimensions whose lower and upper statistics are equal, and one for dimensions whose
    range exceeds the simulator's. path: the value of action.statistics; bounds: the simulator's action bounds, None for
    -1 to 1."""
    constant = statistics.mask & (statistics.q01 == statistics.q99)
    if constant.any():
        yield (
            f"action.statistics={path}: the lower and upper end (such as q01 and q99) of {_indices(constant)} of an "
            f"action are equal, {_values(statistics.q01[constant])}, so the robot always receives this value; check "
            "that it is constant in the data set"
        )
    size = len(statistics.q01)
    low, high = (np.full(size, -1.0), np.full(size, 1.0)) if bounds is None else bounds
    margin = MARGIN * np.where(np.isfinite(high - low), high - low, 0)
    beyond = statistics.mask & ((statistics.q01 < low - margin) | (statistics.q99 > high + margin))
    if beyond.any():
        yield (
            f"action.statistics={path}: the range of {_indices(beyond)} of an action is "
            f"{_values(statistics.q01[beyond])} to {_values(statistics.q99[beyond])}, but the simulator accepts "
            f"{_values(low[beyond])} to {_values(high[beyond])} and clips values beyond; check that the units are the "
            "same (degrees, radians)"
        )


def check_demonstrations(normalizer: ActionNormalizer, actions: NDArray[np.float64]) -> Iterator[str]:
    """Yields a warning if more than `MAX_SHARE` of the numbers in demonstrated actions [n, action], in the robot's
    units, lie outside the range of the policy's actions."""
    distance = normalizer.distance_from_center(actions)
    limit = MAX_DISTANCE_IF_CLIPPED if normalizer.clipped else MAX_DISTANCE
    share = (distance > limit).mean() if distance.size else 0.0
    if share > MAX_SHARE:
        number = int((distance > limit).mean(0).argmax())
        yield (
            f"task.demonstrations: {share:.0%} of the numbers in actions lie outside of the range of the policy's "
            f"statistics (or the simulator's bounds){' and are clipped to it' if normalizer.clipped else ''}; number "
            f"{number} goes from {actions[:, number].min():.4g} to {actions[:, number].max():.4g}. Set "
            "action.statistics to the data set's meta/stats.json (for a LeRobot checkpoint with "
            "action.replace_statistics=true)"
        )


def _indices(mask: NDArray[np.bool_]) -> str:
    """Returns the indices where mask is True as text, such as "numbers 0, 3"."""
    numbers = np.flatnonzero(mask).tolist()
    return f"number{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _values(values: NDArray[np.float64]) -> str:
    """Returns numbers as text with four digits, such as "0.25, -1"."""
    return ", ".join(f"{value:.4g}" for value in values)

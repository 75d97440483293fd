"""Warnings about ranges of actions: statistics that do not fit the simulator or the demonstrations."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from mmrl.policies.vla.heads.codec import ActionNormalizer, ActionStatistics
from mmrl.sims.vector.transitions import Bounds

MARGIN = 0.05  # share of a simulator's range by which quantiles may lie beyond it
# Largest distance of demonstrated numbers from the center of the statistics, in half ranges, without a warning.
MAX_DISTANCE_IF_CLIPPED, MAX_DISTANCE = 1.1, 5.0
MAX_SHARE = 0.05  # share of numbers that may lie farther away; 1 % and 99 % quantiles leave 2 % outside


def check_statistics(path: str, statistics: ActionStatistics, bounds: Bounds | None) -> Iterator[str]:
    """Yields a warning for numbers of actions whose statistics have no range, and for those whose range exceeds the
    simulator's. path: value of action.statistics; bounds: the simulator's action bounds; None: -1 to 1."""
    constant = statistics.mask & (statistics.q01 == statistics.q99)
    if constant.any():
        yield (
            f"action.statistics={path}: q01 and q99 (or what stands for -1 and 1) of {_indices(constant)} are the "
            f"same, {_values(statistics.q01[constant])}: whatever the policy does the robot gets that; check whether "
            "these are constant in the data"
        )
    size = len(statistics.q01)
    low, high = (np.full(size, -1.0), np.full(size, 1.0)) if bounds is None else bounds
    margin = MARGIN * np.where(np.isfinite(high - low), high - low, 0)
    beyond = statistics.mask & ((statistics.q01 < low - margin) | (statistics.q99 > high + margin))
    if beyond.any():
        yield (
            f"action.statistics={path}: {_indices(beyond)} go from {_values(statistics.q01[beyond])} to "
            f"{_values(statistics.q99[beyond])}, but the simulator takes {_values(low[beyond])} to "
            f"{_values(high[beyond])}: what lies beyond is clipped; are the units the same (degrees, radians)?"
        )


def check_demonstrations(normalizer: ActionNormalizer, actions: NDArray[np.float64]) -> Iterator[str]:
    """Yields a warning if many numbers of demonstrated actions [n, action], in the robot's units, lie outside the range
    of the policy's actions."""
    distance = normalizer.distance_from_center(actions)
    limit = MAX_DISTANCE_IF_CLIPPED if normalizer.clipped else MAX_DISTANCE
    share = (distance > limit).mean() if distance.size else 0.0
    if share > MAX_SHARE:
        number = int((distance > limit).mean(0).argmax())
        yield (
            f"task.demonstrations: {share:.0%} of the numbers of actions lie outside of what the policy's statistics "
            f"(or the simulator's bounds) span, number {number} between {actions[:, number].min():.4g} and "
            f"{actions[:, number].max():.4g}"
            f"{'; they are clipped to it' if normalizer.clipped else ''}: set action.statistics to the data set's "
            "meta/stats.json (for a LeRobot checkpoint with action.replace_statistics=true)"
        )


def _indices(mask: NDArray[np.bool_]) -> str:
    """Returns the indices where mask is True as text, such as "numbers 0, 3"."""
    numbers = np.flatnonzero(mask).tolist()
    return f"number{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _values(values: NDArray[np.float64]) -> str:
    return ", ".join(f"{value:.4g}" for value in values)

"""Remarks on ranges of actions: statistics that do not fit the simulator, demonstrations that do not fit either."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from mmrl.policies.vla.heads.codec import ActionStatistics, Units
from mmrl.sims.vector.transitions import Bounds

MARGIN = 0.05  # of a simulator's range: what quantiles may lie beyond it
CUT, FAR = 1.1, 5.0  # halves of the range that data lie from its middle: where they are cut to it, and where not
SHARE = 0.05  # of numbers that may lie there: quantiles leave 2 % of them outside


def probe_range(path: str, scale: ActionStatistics, bounds: Bounds | None) -> Iterator[str]:
    """Finds numbers of statistics that have no range, or whose range the simulator does not take. bounds: of the
    simulator's actions; None: -1 to 1."""
    still = scale.mask & (scale.q01 == scale.q99)
    if still.any():
        yield (
            f"action.statistics={path}: q01 and q99 (or what stands for -1 and 1) of {_numbered(still)} are the same, "
            f"{_shown(scale.q01[still])}: whatever the policy does the robot gets that; look whether these never move"
        )
    low, high = (np.full(len(scale.q01), -1.0), np.full(len(scale.q01), 1.0)) if bounds is None else bounds
    margin = MARGIN * np.where(np.isfinite(high - low), high - low, 0)
    beyond = scale.mask & ((scale.q01 < low - margin) | (scale.q99 > high + margin))
    if beyond.any():
        yield (
            f"action.statistics={path}: {_numbered(beyond)} go from {_shown(scale.q01[beyond])} to "
            f"{_shown(scale.q99[beyond])}, but the simulator takes {_shown(low[beyond])} to {_shown(high[beyond])}: "
            "the rest is cut; are the units the same (degrees, radians)?"
        )


def probe_demonstrated(units: Units, actions: NDArray[np.float64]) -> Iterator[str]:
    """Finds demonstrated actions [number of them, action], in the robot's units, that lie outside of the range that
    the policy acts in."""
    apart = units.outside(actions)
    limit = CUT if units.clipped else FAR
    share = (apart > limit).mean() if apart.size else 0.0
    if share > SHARE:
        number = int((apart > limit).mean(0).argmax())
        yield (
            f"task.demonstrations: {share:.0%} of the numbers of actions lie outside of what the policy's statistics "
            f"(or the simulator's bounds) span, number {number} between {actions[:, number].min():.4g} and "
            f"{actions[:, number].max():.4g}{'; they are cut to it' if units.clipped else ''}: set action.statistics "
            "to the data set's meta/stats.json (for a LeRobot checkpoint with action.replace_statistics=true)"
        )


def _numbered(mask: NDArray[np.bool_]) -> str:
    numbers = np.flatnonzero(mask).tolist()
    return f"number{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _shown(values: NDArray[np.float64]) -> str:
    return ", ".join(f"{value:.4g}" for value in values)

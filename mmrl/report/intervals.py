"""Confidence intervals of success rates."""

from __future__ import annotations


def wilson(successes: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """Returns the lower and upper end of the Wilson interval (1927) of the rate successes / n.

    z: half its width in standard errors; 1.96 makes a 95 % interval.
    """
    share, spread = successes / n, z * z / n
    middle = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * (share * (1 - share) / n + spread / (4 * n)) ** 0.5
    return max(0.0, middle - half), min(1.0, middle + half)

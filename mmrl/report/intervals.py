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


def mean_interval(mean: float, standard_error: float, n: int) -> tuple[float, float]:
    """Returns the lower and upper end of the 95 % interval of a mean of n values.

    If the standard error is that of values that are all 0 or 1, this is the Wilson interval, which has a width also
    where all values are equal; otherwise that of Student's t distribution with n - 1 degrees of freedom. Both ends are
    the mean if there is one value.
    """
    from scipy.stats import t  # takes half a second

    binary_error = (mean * (1 - mean) / (n - 1)) ** 0.5 if n > 1 and 0 <= mean <= 1 else 0.0
    if 0 <= mean <= 1 and abs(standard_error - binary_error) < 1e-4 * max(binary_error, 1e-12):
        return wilson(round(mean * n), n)
    half = float(t.ppf(0.975, n - 1)) * standard_error if n > 1 else 0.0
    return mean - half, mean + half

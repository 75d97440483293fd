"""The Lagrange multiplier of a KL constraint within a group of rollouts."""

from __future__ import annotations

import math

from torch import Tensor


def solve_trust_region_dual(advantages: Tensor, bound: float, minimum: float, maximum: float) -> float:
    """Returns the temperature l in [minimum, maximum] that minimizes l bound + l log mean exp(A / l).

    advantages: A [n]; bound: the largest KL divergence. At the minimum the weights softmax(A / l) of the n samples have
    the KL divergence `bound` from uniform weights. That divergence falls as l grows, so l is found by bisection of its
    logarithm. If `minimum` already satisfies the bound, or `maximum` violates it, that limit is returned.
    """
    advantages = advantages.double()
    n = len(advantages)

    def divergence(temperature: float) -> float:
        log_q = (advantages / temperature).log_softmax(0)
        return float((log_q.exp() * log_q).sum()) + math.log(n)

    if divergence(minimum) <= bound:
        return minimum
    if divergence(maximum) >= bound:
        return maximum
    low, high = math.log(minimum), math.log(maximum)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if divergence(math.exp(middle)) > bound else (low, middle)
    return math.exp((low + high) / 2)

"""Dual variables of constraints that a group's numbers determine."""

from __future__ import annotations

import math

from torch import Tensor


def trust_price(advantages: Tensor, bound: float, least: float, most: float) -> float:
    """The price l in [least, most] that minimises l bound + l log mean exp(A / l), for `advantages` A [n].

    At the minimum the policy that weighs the n samples by exp(A / l) is at a divergence of `bound` from weighing them
    alike. Its divergence falls as l grows, so the price is found by halving; where even `least` keeps within the bound
    it is `least`, where even `most` does not, `most`.
    """
    a = advantages.double()
    n = len(a)

    def divergence(price: float) -> float:
        log_q = (a / price).log_softmax(0)
        return float((log_q.exp() * log_q).sum()) + math.log(n)

    low, high = math.log(least), math.log(most)
    if divergence(least) <= bound:
        return least
    if divergence(most) >= bound:
        return most
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if divergence(math.exp(middle)) > bound else (low, middle)
    return math.exp((low + high) / 2)

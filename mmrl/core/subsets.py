"""The best of every subset of k, in closed form: what pass@k and max@k are made of."""

from __future__ import annotations

from math import comb
from typing import NamedTuple

import torch
from torch import Tensor


class BestOfSubsets(NamedTuple):
    """With n values: mean and std of the maximum of all subsets of k; for each value the mean over the subsets that
    hold it, and over the subsets of k - 1 of the others (0 where k is 1, for those are empty)."""

    mean: float
    std: float
    holding: Tensor  # [n]
    without: Tensor  # [n]


def best_of_subsets(values: Tensor, k: int) -> BestOfSubsets:
    """values: [n] float, 1 <= k <= n. In float64, from the sorted values and binomial coefficients.

    Raises ValueError if k is not in 1 .. n.
    """
    n = len(values)
    if not 1 <= k <= n:
        raise ValueError(f"k={k} is not in 1 .. {n}")
    ranked, order = values.double().sort()
    # The value of place j (from 0) is the maximum of the subsets whose other members have lower places.
    mean, square = (sum(float(v) ** p * comb(j, k - 1) for j, v in enumerate(ranked)) / comb(n, k) for p in (1, 2))
    holding, without = torch.empty(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    for i in range(n):
        own = float(ranked[i]) * comb(i, k - 1)
        if k > 1:
            own += sum(float(ranked[j]) * comb(j - 1, k - 2) for j in range(i + 1, n))
            rest = [float(v) for j, v in enumerate(ranked) if j != i]
            without[order[i]] = sum(v * comb(j, k - 2) for j, v in enumerate(rest)) / comb(n - 1, k - 1)
        holding[order[i]] = own / comb(n - 1, k - 1)
    std = max(0.0, square - mean * mean) ** 0.5
    return BestOfSubsets(mean, std, holding.to(values.dtype), without.to(values.dtype))

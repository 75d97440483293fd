"""Ranks of values within a group, and statistics of the best of k in closed form (pass@k, max@k)."""

from __future__ import annotations

from math import comb
from typing import NamedTuple

import torch
from torch import Tensor


def fraction_beaten(values: Tensor) -> Tensor:
    """Returns for each of `values` [n] the fraction of the other values below it, [n]; an equal one counts half.

    A single value gets 1/2.
    """
    num_others = len(values) - 1
    if num_others < 1:
        return torch.full_like(values, 0.5)
    num_below = (values[:, None] > values[None]).sum(1).to(values.dtype)
    num_equal = (values[:, None] == values[None]).sum(1).to(values.dtype) - 1
    return (num_below + num_equal / 2) / num_others


def inverse_normal(values: Tensor) -> Tensor:
    """Maps values [n] to normal quantiles of their ranks, Phi^-1((rank + 1/2) / n), [n].

    The rank is the number of values below it, where an equal one counts half. If all values are equal, all get 0.
    """
    n = len(values)
    rank = fraction_beaten(values) * (n - 1) if n > 1 else torch.zeros_like(values)
    return torch.special.ndtri((rank + 0.5) / n)


def mean_tanh_preference(values: Tensor, temperature: float) -> Tensor:
    """Returns for each of `values` [n] the mean of tanh((v_i - v_j) / temperature) over the other j, [n].

    A single value gets 0.
    """
    num_others = max(1, len(values) - 1)
    return torch.tanh((values[:, None] - values[None]) / temperature).sum(1) / num_others


class BestOfSubsets(NamedTuple):
    """Statistics of the maximum over subsets of n values."""

    mean: float  # over all subsets of size k
    std: float
    holding: Tensor  # [n], the mean over the subsets of size k that contain the value
    without: Tensor  # [n], the mean over the subsets of size k - 1 of the other values; 0 if k is 1


def best_of_subsets(values: Tensor, k: int) -> BestOfSubsets:
    """Computes statistics of the maximum over the subsets of size k of `values` [n], in closed form in float64.

    Raises ValueError if k is not in 1 .. n.
    """
    n = len(values)
    if not 1 <= k <= n:
        raise ValueError(f"k={k} is not in 1 .. {n}")
    ascending, order = values.double().sort()
    # the value of rank j (from 0) is the maximum of comb(j, k - 1) subsets: those whose other members have lower ranks
    subsets = comb(n, k)
    mean = sum(float(v) * comb(j, k - 1) for j, v in enumerate(ascending)) / subsets
    mean_square = sum(float(v) ** 2 * comb(j, k - 1) for j, v in enumerate(ascending)) / subsets
    holding, without = torch.empty(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    for i in range(n):
        # subsets with the value of rank i: it is their maximum, or a value of higher rank j is
        total = float(ascending[i]) * comb(i, k - 1)
        if k > 1:
            total += sum(float(ascending[j]) * comb(j - 1, k - 2) for j in range(i + 1, n))
            others = [float(v) for j, v in enumerate(ascending) if j != i]
            without[order[i]] = sum(v * comb(j, k - 2) for j, v in enumerate(others)) / comb(n - 1, k - 1)
        holding[order[i]] = total / comb(n - 1, k - 1)
    std = max(0.0, mean_square - mean * mean) ** 0.5
    return BestOfSubsets(mean, std, holding.to(values.dtype), without.to(values.dtype))

"""Ranks of values among one another, and the best of every subset of k in closed form (pass@k, max@k)."""

from __future__ import annotations

from math import comb
from typing import NamedTuple

import torch
from torch import Tensor


def share_beaten(values: Tensor) -> Tensor:
    """[n] -> [n]: the share of the others that a value is above of; an equal one counts half. 1/2 for a value alone."""
    others = len(values) - 1
    if others < 1:
        return torch.full_like(values, 0.5)
    above = (values[:, None] > values[None]).sum(1).to(values.dtype)
    equal = (values[:, None] == values[None]).sum(1).to(values.dtype) - 1
    return (above + equal / 2) / others


def inverse_normal(values: Tensor) -> Tensor:
    """[n] -> [n]: the normal quantile of a value's rank, Phi^-1((rank + 1/2) / n), where the rank counts the values
    below it, an equal one half. Ties share a rank; equal values all get 0."""
    n = len(values)
    rank = share_beaten(values) * (n - 1) if n > 1 else torch.zeros_like(values)
    return torch.special.ndtri((rank + 0.5) / n)


def mean_preference(values: Tensor, temperature: float) -> Tensor:
    """[n] -> [n]: the mean over the others of tanh((v_i - v_j) / temperature); 0 for a value alone."""
    others = max(1, len(values) - 1)
    return torch.tanh((values[:, None] - values[None]) / temperature).sum(1) / others


class BestOfSubsets(NamedTuple):
    """With n values: mean and std of the maximum of all subsets of k; for each value the mean over the subsets that
    hold it, and over the subsets of k - 1 of the others (0 where k is 1, for those are empty)."""

    mean: float
    std: float
    holding: Tensor  # [n]
    without: Tensor  # [n]


def best_of_subsets(values: Tensor, k: int) -> BestOfSubsets:
    """Statistics of the subsets of k of `values` [n], 1 <= k <= n. In float64, from the sorted values and binomial
    coefficients.

    Raises ValueError if k is not in 1 .. n.
    """
    n = len(values)
    if not 1 <= k <= n:
        raise ValueError(f"k={k} is not in 1 .. {n}")
    ranked, order = values.double().sort()
    # The value of rank j (from 0) is the maximum of the subsets whose other members have lower ranks.
    mean, square = (sum(float(v) ** p * comb(j, k - 1) for j, v in enumerate(ranked)) / comb(n, k) for p in (1, 2))
    holding, without = torch.empty(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    for i in range(n):
        total = float(ranked[i]) * comb(i, k - 1)
        if k > 1:
            total += sum(float(ranked[j]) * comb(j - 1, k - 2) for j in range(i + 1, n))
            others = [float(v) for j, v in enumerate(ranked) if j != i]
            without[order[i]] = sum(v * comb(j, k - 2) for j, v in enumerate(others)) / comb(n - 1, k - 1)
        holding[order[i]] = total / comb(n - 1, k - 1)
    std = max(0.0, square - mean * mean) ** 0.5
    return BestOfSubsets(mean, std, holding.to(values.dtype), without.to(values.dtype))

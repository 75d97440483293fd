"""Places of values among one another."""

from __future__ import annotations

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
    """[n] -> [n]: the normal quantile of a value's place, Phi^-1((place + 1/2) / n), where place counts the values
    below it, an equal one half. Ties share a place; equal values all get 0."""
    n = len(values)
    place = share_beaten(values) * (n - 1) if n > 1 else torch.zeros_like(values)
    return torch.special.ndtri((place + 0.5) / n)


def mean_preference(values: Tensor, temperature: float) -> Tensor:
    """[n] -> [n]: the mean over the others of tanh((v_i - v_j) / temperature); 0 for a value alone."""
    others = max(1, len(values) - 1)
    return torch.tanh((values[:, None] - values[None]) / temperature).sum(1) / others

"""Likelihood ratios between the policy that learns and the one that made the rollouts."""

from __future__ import annotations

import torch
from torch import Tensor

LEVELS = ("decision", "segment", "sequence")
BOUND = 20.0  # exp(20) is 5e8: beyond it a ratio says only that something is broken


def log_ratio(
    logp: Tensor, old_logp: Tensor, mask: Tensor, *, level: str = "decision", segments: Tensor | None = None
) -> Tensor:
    """Log-ratio of every decision [B, T], clamped to +-20; gradient flows to `logp` [B, T].

    level
      decision   logp - old_logp
      segment    its mean over the counted decisions with the same id in `segments` [B, T] (any int64) in one rollout
      sequence   its mean over the counted decisions of the rollout (GSPO, arXiv 2507.18071)

    A mean is given to each decision of its unit. Entries outside `mask` are 0 and have no gradient, also where logp
    or old_logp holds NaN or inf. With logp equal to old_logp the result is exactly 0 at every level.

    Raises ValueError for an unknown level, and for level "segment" without `segments`.
    """
    return by_unit(logp - old_logp.detach(), mask, level=level, segments=segments)


def by_unit(log_ratio: Tensor, mask: Tensor, *, level: str = "decision", segments: Tensor | None = None) -> Tensor:
    """Log-ratios [B, T] that are known per decision, brought to `level` and clamped, as `log_ratio` does it."""
    if level not in LEVELS:
        raise ValueError(f"level must be one of {', '.join(LEVELS)}; got {level!r}")
    counted = mask.bool()
    difference = log_ratio.where(counted, 0)
    if level == "sequence":
        mean = difference.sum(1, keepdim=True) / counted.sum(1, keepdim=True).clamp(min=1)
        difference = mean.expand_as(difference)
    elif level == "segment":
        if segments is None:
            raise ValueError("level 'segment' needs segments [B, T]")
        difference = _segment_mean(difference, counted, segments)
    return difference.clamp(-BOUND, BOUND).where(counted, 0)


def normalised(log_ratio: Tensor, divergence: Tensor, std: Tensor) -> Tensor:
    """GRPO-Guard's regulated log-ratio of Gaussian steps, (log_ratio + divergence) std (arXiv 2510.22319).

    All [B, T]; `divergence` is the exact KL to the old policy in the units of log_ratio (mean or sum over elements),
    with its gradient. Under the old policy log_ratio has mean -KL and a spread that goes as 1 / std: this takes out
    both, so that one clip range bounds every step alike and from both sides. log_ratio + KL is linear in the mean of
    the step, so the gradient of the sum has mean 0 under the old policy; that of log_ratio alone has not.
    """
    return (log_ratio + divergence) * std


def unit_sum(values: Tensor, units: Tensor | None) -> Tensor:
    """[B, T]: the sum of values [B, T] over the decisions with the same id in `units` [B, T], given to each of them. A
    unit never spans two rollouts: it is (row, id). Without units a rollout is one."""
    if units is None:
        return values.sum(1, keepdim=True).expand_as(values)
    unique, ids = torch.unique(units, return_inverse=True)
    rows = torch.arange(len(values), device=values.device)[:, None]
    index = (rows * len(unique) + ids).flatten()
    total = values.new_zeros(len(values) * len(unique)).index_add(0, index, values.flatten())
    return total[index].view_as(values)


def _segment_mean(values: Tensor, counted: Tensor, segments: Tensor) -> Tensor:
    """[B, T] -> [B, T]"""
    return unit_sum(values, segments) / unit_sum(counted.to(values.dtype), segments).clamp(min=1)

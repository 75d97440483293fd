"""Likelihood ratios between the current policy and the old policy that made the rollouts.

Shapes: B rollouts, T decisions (tokens, denoising steps or actions).
"""

from __future__ import annotations

import torch
from torch import Tensor

LEVELS = ("decision", "segment", "sequence")
BOUND = 20.0  # bound of log-ratios: exp(20) is 5e8, which a working policy does not reach


def log_ratio(
    logp: Tensor, old_logp: Tensor, mask: Tensor, *, level: str = "decision", segments: Tensor | None = None
) -> Tensor:
    """Computes the log-ratio of each decision, [B, T], clamped to +-20. The gradient flows to `logp` [B, T].

    level
      decision   logp - old_logp
      segment    its mean over the masked-in decisions of the segment; segments: [B, T], any int64 ids per rollout
      sequence   its mean over the masked-in decisions of the rollout (GSPO, arXiv 2507.18071)

    A mean is repeated for each decision of its segment or rollout. Entries outside `mask` are 0 and have no gradient,
    also where logp or old_logp is NaN or inf. If logp equals old_logp, the result is exactly 0 at every level.

    Raises ValueError if the level is unknown, or if level "segment" has no `segments`.
    """
    return aggregate_log_ratio(logp - old_logp.detach(), mask, level=level, segments=segments)


def aggregate_log_ratio(
    log_ratio: Tensor, mask: Tensor, *, level: str = "decision", segments: Tensor | None = None
) -> Tensor:
    """Averages log-ratios of decisions and clamps them to +-20. Returns [B, T], 0 outside the mask.

    log_ratio, mask: [B, T]. level: decision (no average), segment or sequence (the rollout); the mean is repeated for
    each decision. segments: [B, T], the segment ids of level "segment".
    """
    if level not in LEVELS:
        raise ValueError(f"level must be one of {', '.join(LEVELS)}; got {level!r}")
    mask = mask.bool()
    difference = log_ratio.where(mask, 0)
    if level == "sequence":
        mean = difference.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
        difference = mean.expand_as(difference)
    elif level == "segment":
        if segments is None:
            raise ValueError("level 'segment' needs segments [B, T]")
        difference = _segment_mean(difference, mask, segments)
    return difference.clamp(-BOUND, BOUND).where(mask, 0)


def regulate_log_ratio(log_ratio: Tensor, divergence: Tensor, std: Tensor) -> Tensor:
    """Returns GRPO-Guard's regulated log-ratio of Gaussian steps, (log_ratio + divergence) std (arXiv 2510.22319).

    All are [B, T]; divergence: the exact KL to the old policy with its gradient, reduced over elements as log_ratio is;
    std: standard deviation of the step. Under the old policy, log_ratio has mean -KL and a standard deviation
    proportional to 1 / std. This removes both, so that one clip range bounds all steps equally and symmetrically.
    """
    return (log_ratio + divergence) * std


def sum_per_unit(values: Tensor, units: Tensor | None) -> Tensor:
    """Sums values [B, T] over the decisions of a unit and repeats the sum for each of them. Returns [B, T].

    units: [B, T], any int64 ids; equal ids in different rollouts are different units. None: each rollout is a unit.
    """
    if units is None:
        return values.sum(1, keepdim=True).expand_as(values)
    unique, ids = torch.unique(units, return_inverse=True)
    rows = torch.arange(len(values), device=values.device)[:, None]
    index = (rows * len(unique) + ids).flatten()
    total = values.new_zeros(len(values) * len(unique)).index_add(0, index, values.flatten())
    return total[index].view_as(values)


def _segment_mean(values: Tensor, mask: Tensor, segments: Tensor) -> Tensor:
    """Averages values [B, T], which are 0 outside the mask, over the masked-in decisions of each segment, [B, T]."""
    return sum_per_unit(values, segments) / sum_per_unit(mask.to(values.dtype), segments).clamp(min=1)

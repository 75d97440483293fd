"""Reduction of per-decision losses to a scalar, with denominators of the whole batch, not of a micro-batch.

No other module averages losses.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmrl.core.ratios import sum_per_unit

MODES = ("token_mean", "segment_mean", "sequence_mean", "sequence_sum", "constant")


def reduce(
    values: Tensor,
    mask: Tensor,
    *,
    mode: str = "token_mean",
    total: Tensor | float | None = None,
    length: float | None = None,
    segments: Tensor | None = None,
) -> Tensor:
    """Reduces `values` [B, T] where `mask` [B, T] is set to a scalar. R is the number of rollouts with such a decision.

    mode
      token_mean      sum / number of masked-in decisions (arXiv 2503.14476)
      segment_mean    mean of the segment means
      sequence_mean   mean of the rollout means: sum of the means / R (arXiv 2402.03300)
      sequence_sum    mean of the rollout sums: sum / R
      constant        sum / (R * length) (Dr.GRPO, arXiv 2503.20783)

    total: if this is a micro-batch of a larger batch, the sum of `denominator` over all micro-batches; then the results
    add up to that of the whole batch, in value and gradient. segments: [B, T] int64, the segment of each decision, for
    segment_mean. Values outside the mask may be NaN; they change neither the result nor the gradient. If the mask is
    empty, the result is 0 with the graph attached.

    Raises ValueError if the mode is unknown, if "constant" has no positive `length`, or segment_mean no `segments`.
    """
    counted = mask.bool()
    local = denominator(counted, mode=mode, segments=segments)
    values = values.where(counted, 0)
    rows = (values if mode != "segment_mean" else values * segment_weights(counted, segments)).sum(1)
    if mode == "sequence_mean":
        rows = rows / counted.sum(1).clamp(min=1)
    if mode == "constant":
        if length is None or length <= 0:
            raise ValueError(f"mode 'constant' needs a positive length, got {length}")
        rows = rows / length
    # a total of 0 means an empty mask everywhere: the sum is 0, and clamp avoids 0 / 0
    return rows.sum() / torch.as_tensor(local if total is None else total, device=rows.device).clamp(min=1)


def denominator(mask: Tensor, *, mode: str = "token_mean", segments: Tensor | None = None) -> Tensor:
    """Returns what a micro-batch adds to the number by which the loss of the whole batch is divided, 0-d int64.

    The sum over micro-batches and ranks is the `total` of `reduce`. Counted are masked-in decisions for token_mean,
    segments with such a decision for segment_mean, and rollouts with one for the other modes. mask: [B, T].

    Raises ValueError if the mode is unknown, or if segment_mean has no `segments`.
    """
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}; got {mode!r}")
    counted = mask.bool()
    if mode == "segment_mean":
        return segment_weights(counted, segments).sum().round().long()  # the weights of a segment add up to 1
    return counted.sum() if mode == "token_mean" else counted.any(1).sum()


def segment_weights(mask: Tensor, segments: Tensor | None) -> Tensor:
    """Returns 1 / the number of masked-in decisions in the segment of each decision, [B, T] fp32; 0 outside the mask.

    Raises ValueError if `segments` is None.
    """
    if segments is None:
        raise ValueError("mode 'segment_mean' needs segments [B, T]")
    counted = mask.float()
    return counted / sum_per_unit(counted, segments.to(mask.device)).clamp(min=1)

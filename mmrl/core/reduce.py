"""The only place where per-decision values are averaged, with denominators of the whole batch, not of a part."""

from __future__ import annotations

import torch
from torch import Tensor

from mmrl.core.ratios import unit_sum

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
    """Scalar loss of `values` [B, T] where `mask` [B, T] counts. R is the number of rollouts with a counted decision.

    mode
      token_mean      sum / number of counted decisions (arXiv 2503.14476)
      segment_mean    sum over segments of each one's mean / number of segments with a counted decision
      sequence_mean   sum over rollouts of each one's mean / R (arXiv 2402.03300)
      sequence_sum    sum over rollouts of each one's sum / R
      constant        sum / (R * length) (Dr.GRPO, arXiv 2503.20783)

    When this batch is a part of a larger one, `total` is the sum of `denominator` over all parts; then the reductions
    of the parts add up to that of the whole, in value and gradient. Values outside the mask may be NaN: they reach
    neither the result nor the gradient. If nothing counts, the result is 0 with the graph attached.

    segments: [B, T] int64, the segment of its rollout that a decision belongs to, for segment_mean.

    Raises ValueError for an unknown mode, for "constant" without a positive `length`, and for segment_mean without
    `segments`.
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
    # A total of 0 means an empty mask everywhere: the sum is 0 and only the division needs care.
    return rows.sum() / torch.as_tensor(local if total is None else total, device=rows.device).clamp(min=1)


def denominator(mask: Tensor, *, mode: str = "token_mean", segments: Tensor | None = None) -> Tensor:
    """The part of `mask` [B, T] in the `total` of `reduce`, a 0-d int64.

    The number of counted decisions for token_mean, of segments with any for segment_mean, of rollouts with any for the
    other modes.

    Raises ValueError for an unknown mode, and for segment_mean without `segments`.
    """
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}; got {mode!r}")
    counted = mask.bool()
    if mode == "segment_mean":
        return segment_weights(counted, segments).sum().round().long()
    return counted.sum() if mode == "token_mean" else counted.any(1).sum()


def segment_weights(mask: Tensor, segments: Tensor | None) -> Tensor:
    """Returns 1 / the number of counted decisions in the segment of each decision, 0 where none counts, [B, T] fp32.

    Raises ValueError without `segments`.
    """
    if segments is None:
        raise ValueError("mode 'segment_mean' needs segments [B, T]")
    counted = mask.float()
    return counted / unit_sum(counted, segments.to(mask.device)).clamp(min=1)

"""Importance weights and masks for decisions that another engine sampled, with slightly different likelihoods."""

from __future__ import annotations

import torch
from torch import Tensor

from mmrl.core.ratios import BOUND

LEVELS = ("token", "sequence", "geometric")


def log_weight(old_logp: Tensor, behaviour_logp: Tensor, mask: Tensor, *, level: str = "token") -> Tensor:
    """log of pi_old / pi_behaviour [B, T], clamped to +-20 and 0 outside `mask`.

    level
      token       old_logp - behaviour_logp of the decision
      sequence    its sum over the counted decisions of the rollout: the exact weight of the whole response
      geometric   its mean over them, which does not grow with the length

    A sum or mean is given to each decision of its rollout. Entries outside `mask` may hold NaN or inf.

    Raises ValueError for an unknown level.
    """
    if level not in LEVELS:
        raise ValueError(f"level must be one of {', '.join(LEVELS)}; got {level!r}")
    counted = mask.bool()
    difference = (old_logp - behaviour_logp).where(counted, 0)
    if level != "token":
        total = difference.sum(1, keepdim=True)
        if level == "geometric":
            total = total / counted.sum(1, keepdim=True).clamp(min=1)
        difference = total.expand_as(difference)
    return difference.clamp(-BOUND, BOUND).where(counted, 0)


@torch.no_grad()
def correction_weight(
    old_logp: Tensor,
    behaviour_logp: Tensor,
    mask: Tensor,
    *,
    weight: str | None = "token",
    cap: float = 2.0,
    reject: str | None = None,
    low: float = 0.5,
    high: float = 2.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Detached factors [B, T] of the decisions in the loss, and statistics [B, T]; all are 0 outside `mask`.

    `weight` names the level of truncated importance sampling, min(exp(log_weight), cap), or is None for weights of 1.
    `reject` names the level of a mask: decisions whose own exp(log_weight) lies outside [low, high] get the factor 0.
    A rejected decision still counts in the denominators of the loss.

    Statistics: logp_gap, |old_logp - behaviour_logp|; weight and weight_squared of the weights before the cap, from
    whose means `effective_sample_size` follows; clipped and rejected, 1 where the cap or the mask took effect.

    Raises ValueError for an unknown level.
    """
    counted = mask.bool()
    raw = counted.to(old_logp.dtype)
    if weight is not None:
        raw = log_weight(old_logp, behaviour_logp, mask, level=weight).exp().where(counted, 0)
    accepted = counted
    if reject is not None:
        compared = log_weight(old_logp, behaviour_logp, mask, level=reject).exp()
        accepted = counted & (compared >= low) & (compared <= high)
    stats = {
        "logp_gap": (old_logp - behaviour_logp).abs().where(counted, 0),
        "weight": raw,
        "weight_squared": raw.square(),
        "clipped": (raw > cap).to(raw.dtype),
        "rejected": (counted & ~accepted).to(raw.dtype),
    }
    return raw.clamp(max=cap).where(accepted, 0), stats


def effective_sample_size(weight: float, weight_squared: float) -> float:
    """(sum w)^2 / (n sum w^2) in (0, 1], from the means of w and w^2: 1 when both engines agree."""
    return weight**2 / weight_squared

"""Importance weights and masks for the gap between the sampling engine (such as vLLM) and the trainer.

`behaviour_logp` are the log-probabilities of the engine that sampled; `old_logp` are the trainer's for the same
weights. Shapes: B rollouts, T decisions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmrl.core.ratios import BOUND

LEVELS = ("token", "sequence", "geometric")


def log_weight(old_logp: Tensor, behaviour_logp: Tensor, mask: Tensor, *, level: str = "token") -> Tensor:
    """Computes log(pi_old / pi_behaviour) [B, T], clamped to +-20; 0 outside `mask`.

    level
      token       old_logp - behaviour_logp of the decision
      sequence    its sum over the masked-in decisions of the rollout: the exact weight of the whole response
      geometric   its mean over them, which does not grow with the length

    A sum or mean is repeated for each decision of its rollout. Entries outside `mask` may hold NaN or inf.

    Raises ValueError if the level is unknown.
    """
    if level not in LEVELS:
        raise ValueError(f"level must be one of {', '.join(LEVELS)}; got {level!r}")
    mask = mask.bool()
    difference = (old_logp - behaviour_logp).where(mask, 0)
    if level != "token":
        total = difference.sum(1, keepdim=True)
        if level == "geometric":
            total = total / mask.sum(1, keepdim=True).clamp(min=1)
        difference = total.expand_as(difference)
    return difference.clamp(-BOUND, BOUND).where(mask, 0)


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
    """Computes detached loss weights of the decisions [B, T], and statistics [B, T]; all are 0 outside `mask`.

    weight: the level (see `log_weight`) of truncated importance sampling, min(exp(log_weight), cap); None: weights 1.
    reject: the level of a mask: decisions whose exp(log_weight) is outside [low, high] get weight 0; None: no mask.
    A rejected decision still counts in the denominators of the loss.

    Statistics: logp_gap, |old_logp - behaviour_logp|; weight and weight_squared, before the cap (see
    `effective_sample_size`); clipped and rejected, 1 where the cap or the mask took effect.

    Raises ValueError if a level is unknown.
    """
    mask = mask.bool()
    raw = mask.to(old_logp.dtype)
    if weight is not None:
        raw = log_weight(old_logp, behaviour_logp, mask, level=weight).exp().where(mask, 0)
    accepted = mask
    if reject is not None:
        ratio = log_weight(old_logp, behaviour_logp, mask, level=reject).exp()
        accepted = mask & (ratio >= low) & (ratio <= high)
    stats = {
        "logp_gap": (old_logp - behaviour_logp).abs().where(mask, 0),
        "weight": raw,
        "weight_squared": raw.square(),
        "clipped": (raw > cap).to(raw.dtype),
        "rejected": (mask & ~accepted).to(raw.dtype),
    }
    return raw.clamp(max=cap).where(accepted, 0), stats


def effective_sample_size(weight: float, weight_squared: float) -> float:
    """Returns the relative effective sample size (sum w)^2 / (n sum w^2) in (0, 1]; 1 when both engines agree.

    weight, weight_squared: the means of w and w^2 over the n decisions.
    """
    return weight**2 / weight_squared

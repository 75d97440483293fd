"""Surrogate objectives: per-decision losses. Nothing is averaged or masked here; see `reduce`.

Each function takes log_ratio [B, T] and advantages `a` that broadcast to it. It returns values to minimize and
statistics, all [B, T].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

Result = tuple[Tensor, dict[str, Tensor]]


def surrogate(
    log_ratio: Tensor,
    advantages: Tensor,
    *,
    kind: str = "clip",
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    **options: Tensor | float,
) -> Result:
    """Computes a surrogate objective. Returns values [B, T] to minimize, and statistics.

    log_ratio: [B, T]; advantages: A, [B] or [B, T], detached here. With r = exp(log_ratio):

    kind              value                                             options (default)
    clip              -min(r A, clamp(r, 1 - low, 1 + high) A)          PPO, arXiv 1707.06347; two bounds 2503.14476
    dual_clip         the same, at most cap |A| where A < 0             cap (3.0); arXiv 1912.09729
    cispo             gradient -clamp(r, 1 - low, 1 + high) A dlogp     arXiv 2506.13585
    soft              -A sigmoid(tau (r - 1)) 4 / tau,                  tau_positive (1.0), tau_negative (1.05);
                      tau by the sign of A                              arXiv 2511.20347
    divergence_mask   -r A, or 0 where divergence > bound and           divergence [B, T] and bound, both required;
                      the step moves further away (r > 1 with A > 0,    arXiv 2602.04879
                      r < 1 with A < 0)
    gaussian_weight   -w r A, w = exp(-log_ratio^2 / (2 sigma^2))       sigma (0.2: w is about 1/2 at r = 1.28);
                      detached                                          arXiv 2603.03955
    unclipped         -r A                                              conservative policy iteration, arXiv 1707.06347
    reinforce         gradient -A dlogp, whatever the ratio

    The values of cispo and reinforce are -clamp(r, ...) A and -A. low and high are `clip_low` and `clip_high`, which
    only clip, dual_clip and cispo use. For `divergence` see regularizers: token_divergence, gaussian_kl.

    Statistics are detached [B, T] tensors in the dtype of the values, which the caller averages over its mask: "ratio"
    always; "clip_low", "clip_high" (1 where that bound is active) for clip, dual_clip and cispo; "dual_clip"; "dropped"
    for divergence_mask; "weight" for cispo and gaussian_weight.

    Raises ValueError if the kind is unknown, or if an option is unknown or missing.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}; got {kind!r}")
    function, defaults = KINDS[kind]
    if unknown := options.keys() - defaults.keys():
        raise ValueError(f"surrogate {kind!r} takes {_names(defaults)}; got {_names(unknown)}")
    options = {**defaults, **options}
    if missing := [name for name, value in options.items() if value is REQUIRED]:
        raise ValueError(f"surrogate {kind!r} needs {_names(missing)}")
    if kind in CLIPPED:
        options.update(low=clip_low, high=clip_high)
    advantages = advantages.detach()
    values, stats = function(log_ratio, advantages[:, None] if advantages.dim() == 1 else advantages, **options)
    stats["ratio"] = log_ratio.exp()
    return values, {name: s.detach().to(values.dtype) for name, s in stats.items()}


def _clip(log_ratio: Tensor, a: Tensor, *, low: float, high: float) -> Result:
    ratio = log_ratio.exp()
    values = -torch.minimum(ratio * a, ratio.clamp(1 - low, 1 + high) * a)
    return values, {"clip_low": (a < 0) & (ratio < 1 - low), "clip_high": (a > 0) & (ratio > 1 + high)}


def _dual_clip(log_ratio: Tensor, a: Tensor, *, low: float, high: float, cap: float) -> Result:
    values, stats = _clip(log_ratio, a, low=low, high=high)
    capped = (a < 0) & (values > -cap * a)
    return torch.where(capped, -cap * a, values), {**stats, "dual_clip": capped}


def _cispo(log_ratio: Tensor, a: Tensor, *, low: float, high: float) -> Result:
    """Returns values with the gradient -w A dlogp, w the clamped, detached ratio, and statistics; see `surrogate`."""
    ratio = log_ratio.detach().exp()
    weight = ratio.clamp(1 - low, 1 + high)
    stats = {"weight": weight, "clip_low": ratio < 1 - low, "clip_high": ratio > 1 + high}
    return policy_gradient_values(weight * a, log_ratio), stats


def _soft(log_ratio: Tensor, a: Tensor, *, tau_positive: float, tau_negative: float) -> Result:
    tau = torch.where(a > 0, tau_positive, tau_negative).to(log_ratio.dtype)
    return -a * torch.sigmoid(tau * (log_ratio.exp() - 1)) * 4 / tau, {}


def _divergence_mask(log_ratio: Tensor, a: Tensor, *, divergence: Tensor, bound: float) -> Result:
    moves_further = log_ratio.detach() * a > 0
    dropped = moves_further & (divergence.detach() > bound)
    return torch.where(dropped, 0, -log_ratio.exp() * a), {"dropped": dropped}


def _gaussian_weight(log_ratio: Tensor, a: Tensor, *, sigma: float) -> Result:
    weight = (-log_ratio.detach().square() / (2 * sigma**2)).exp()
    return -weight * log_ratio.exp() * a, {"weight": weight}


def _unclipped(log_ratio: Tensor, a: Tensor) -> Result:
    return -log_ratio.exp() * a, {}


def _reinforce(log_ratio: Tensor, a: Tensor) -> Result:
    return policy_gradient_values(a, log_ratio), {}


def policy_gradient_values(weight: Tensor, log_ratio: Tensor) -> Tensor:
    """Returns -weight [B, T] with the gradient -weight with respect to log_ratio [B, T]; weight gets no gradient."""
    return -weight.detach() * (log_ratio - log_ratio.detach()).exp()


def _names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "no options"


REQUIRED = object()
CLIPPED = ("clip", "dual_clip", "cispo")
KINDS: dict[str, tuple[Callable[..., Result], dict[str, Any]]] = {
    "clip": (_clip, {}),
    "dual_clip": (_dual_clip, {"cap": 3.0}),
    "cispo": (_cispo, {}),
    "soft": (_soft, {"tau_positive": 1.0, "tau_negative": 1.05}),
    "divergence_mask": (_divergence_mask, {"divergence": REQUIRED, "bound": REQUIRED}),
    "gaussian_weight": (_gaussian_weight, {"sigma": 0.2}),
    "unclipped": (_unclipped, {}),
    "reinforce": (_reinforce, {}),
}

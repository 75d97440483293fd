"""One denoising step as a Gaussian whose mean is linear in the latent and the network's prediction.

Convention: x_s = (1 - s) data + s noise, v = noise - data, the noise level sigma s falls from 1 to 0, dt = s' - s < 0.
Only the kind `ddim` is for models that predict the noise e, with x_s = sqrt(1 - s^2) data + s e; there a_v multiplies
e.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from mmrl import kernels

KINDS = ("ode", "flow_sde", "dance_sde", "cps", "ddim")
REDUCTIONS = ("mean", "sum")


class Coefficients(NamedTuple):
    """The coefficients of a step x' = a_x x + a_v v + std noise; 0-d or [row] each, fp32."""

    a_x: Tensor
    a_v: Tensor
    std: Tensor


def coefficients(
    kind: str,
    sigma: Tensor | float,
    sigma_next: Tensor | float,
    *,
    noise: float = 0.0,
    sigma_second: Tensor | float | None = None,
) -> Coefficients:
    """Computes the coefficients of the step from `sigma` to `sigma_next` (0-d or [row]), in float64, rounded to fp32.

    kind         with dt = s' - s, D = 1 + g^2 (1 - s) / (2 s)
      ode        a_x = 1, a_v = dt, std = 0 (Euler)
      flow_sde   a_x = 1 + g^2 dt / (2 s), a_v = D dt, std = g sqrt(-dt), with g = noise sqrt(s / (1 - s)); at s = 1,
                 g uses `sigma_second`, the grid's second sigma, in 1 - s (Flow-GRPO, arXiv 2505.05470)
      dance_sde  the same with g = noise (DanceGRPO, arXiv 2505.07818)
      cps        std = s' sin(noise pi / 2), q = sqrt(s'^2 - std^2), a_x = (1 - s') + q,
                 a_v = -s (1 - s') + (1 - s) q (Flow-CPS, arXiv 2509.05952)
      ddim       with ab = 1 - s^2: std = noise sqrt((1 - ab') / (1 - ab) (1 - ab / ab')), q = sqrt(1 - ab' - std^2),
                 a_x = sqrt(ab' / ab), a_v = q - a_x s (arXiv 2010.02502)

    With noise 0, every kind except ddim equals `ode` bit for bit.

    Raises ValueError for an unknown kind, sigmas that do not decrease, noise out of range, and flow_sde at sigma 1
    without `sigma_second`.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown transition {kind!r}; use one of {', '.join(KINDS)}")
    max_noise = 1 if kind in ("cps", "ddim") else math.inf
    if not 0 <= noise <= max_noise:
        bounds = "of at least 0" if max_noise == math.inf else f"from 0 to {max_noise}"
        raise ValueError(f"transition {kind} takes noise {bounds}, got {noise}")
    s, s_next = _double(sigma), _double(sigma_next)
    if not bool((s_next < s).all()):
        raise ValueError("sigmas must decrease, but sigma_next is not below sigma")
    dt = s_next - s
    if kind == "ddim":
        terms = _ddim(s, s_next, noise)
    elif kind == "cps":
        std = s_next * math.sin(noise * math.pi / 2)
        change = (s_next.square() - std.square()).clamp(min=0).sqrt() - s_next  # q - s', exactly 0 without noise
        terms = 1 + change, dt + (1 - s) * change, std
    elif kind == "ode" or noise == 0:
        terms = torch.ones_like(dt), dt, torch.zeros_like(dt)
    else:
        g = (
            torch.full_like(s, noise)
            if kind == "dance_sde"
            else noise * (s / (1 - _with_finite_variance(s, sigma_second))).sqrt()
        )
        half = g.square() / (2 * s)
        terms = 1 + half * dt, (1 + half * (1 - s)) * dt, g * (-dt).sqrt()
    return Coefficients(*(value.float() for value in terms))


def gaussian_step(
    x: Tensor,
    v: Tensor,
    coefficients: Coefficients,
    *,
    x_next: Tensor | None = None,
    noise: Tensor | None = None,
    reduction: str = "mean",
    keep_mean: bool = True,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Samples a step (give `noise`) or replays one (give `x_next`); returns (x_next, logp, mean).

    x, v, noise, x_next: [row, ...]. coefficients: 0-d or [row]. mean = a_x x + a_v v, x_next = mean + std noise. logp
    [row] is log Normal(x_next; mean, std) with its constants, averaged over the elements of a row (reduction "mean") or
    summed ("sum"). All are fp32, or float64 for float64 inputs.

    A row with std 0 is a deterministic step and no decision: its logp is 0. Sampling has no gradient; in replay the
    gradient flows through the mean to `v`. The mean is None in replay, and if `keep_mean` is False. Raises ValueError
    for an unknown reduction, shapes that do not fit, and unless exactly one of x_next and noise is given.
    """
    if (x_next is None) == (noise is None):
        raise ValueError("give either noise, to sample, or x_next, to replay, and not both or neither")
    rows = _rows(coefficients, v)
    if noise is not None:
        return kernels.denoise_step(x, v, noise, *rows, reduction=reduction, keep_mean=keep_mean)
    assert x_next is not None
    return x_next, kernels.denoise_logprob(x, v, x_next, *rows, reduction=reduction).logp, None


class Comparison(NamedTuple):
    """The likelihood of a step under one prediction compared with another, [row] each; see `compare_steps`."""

    logp: Tensor
    log_ratio: Tensor
    kl: Tensor


def compare_steps(
    x: Tensor,
    v: Tensor,
    old_v: Tensor,
    coefficients: Coefficients,
    x_next: Tensor,
    *,
    reduction: str = "mean",
) -> Comparison:
    """Compares a step under predictions `v` and `old_v`: log Normal(x_next; mean(v), std), its log-ratio to
    log Normal(x_next; mean(old_v), std), and the exact KL of the two Gaussians.

    x, v, old_v, x_next: [row, ...]; coefficients 0-d or [row]; results [row]. With m = a_v (v - old_v) the log-ratio is
    computed as m (2 (x_next - old mean) - m) / (2 std^2). This is exactly 0 if v equals old_v, and accurate where the
    difference of two log-likelihoods would be lost in rounding. Gradients flow to `v`.
    """
    rows = _rows(coefficients, v)
    likelihood = kernels.denoise_logprob(x, v, x_next, *rows, v_old=old_v, v_ref=old_v, reduction=reduction)
    assert likelihood.log_ratio is not None and likelihood.kl is not None
    return Comparison(likelihood.logp, likelihood.log_ratio, likelihood.kl)


def step_kl(v: Tensor, other_v: Tensor, coefficients: Coefficients, *, reduction: str = "mean") -> Tensor:
    """Returns the exact KL [row] of the steps under the predictions `v` and `other_v` [row, ...]: a_v^2 |v - other_v|^2
    / (2 std^2), 0 where std is 0. Gradients flow to `v`."""
    x = v.detach()  # any value: the divergence does not depend on the latents
    likelihood = kernels.denoise_logprob(x, v, x, *_rows(coefficients, v), v_ref=other_v, reduction=reduction)
    assert likelihood.kl is not None
    return likelihood.kl


def reduce_elements(values: Tensor, reduction: str) -> Tensor:
    """Reduces [row, ...] to [row] by the "mean" or the "sum" over elements. Raises ValueError for another reduction."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}; got {reduction!r}")
    rows = values.reshape(len(values), -1)
    return rows.mean(1) if reduction == "mean" else rows.sum(1)


def _ddim(s: Tensor, s_next: Tensor, eta: float) -> tuple[Tensor, Tensor, Tensor]:
    """Returns DDIM's a_x, a_v and std, [row] each, from noise levels s to s_next, both [row] (arXiv 2010.02502)."""
    alpha, alpha_next = 1 - s.square(), 1 - s_next.square()  # diffusers' alphas_cumprod
    std = eta * (s_next.square() / s.square() * (1 - alpha / alpha_next)).sqrt()
    direction = (s_next.square() - std.square()).clamp(min=0).sqrt()
    a_x = (alpha_next / alpha).sqrt()
    return a_x, direction - a_x * s, std


def _with_finite_variance(s: Tensor, sigma_second: Tensor | float | None) -> Tensor:
    """Returns s with 1 replaced by the grid's second sigma, at which flow_sde's variance is finite. Raises ValueError
    if it is needed and None."""
    if sigma_second is None:
        if bool((s >= 1).any()):
            raise ValueError("flow_sde at sigma 1 divides by zero: give sigma_second, the grid's second sigma")
        return s
    return s.where(s < 1, _double(sigma_second))


def _double(value: Tensor | float) -> Tensor:
    """Returns a number or tensor as a float64 tensor."""
    return torch.as_tensor(value).double()


def _rows(coefficients: Coefficients, v: Tensor) -> list[Tensor]:
    """Returns the coefficients, [row] each, on v's device, in float64 if v is float64, else fp32."""
    dtype = torch.promote_types(v.dtype, torch.float32)
    return [c.to(v.device, dtype).expand(len(v)).contiguous() for c in coefficients]

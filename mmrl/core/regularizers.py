"""Distances between policies: sampled estimates for tokens, sums over alternatives, the exact divergence for Gaussian
steps."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from mmrl.core.ratios import BOUND

KINDS = ("k1", "k2", "k3", "absolute")
DIVERGENCES = ("tv", "kl")
REDUCTIONS = ("mean", "sum")
Direction = Literal["reverse", "forward"]
LEAST = 1e-7  # probability that is left to alternatives which are not listed, about fp32's rounding of their sum


def kl_estimate(logp: Tensor, ref_logp: Tensor, *, kind: str = "k3", mask: Tensor | None = None) -> Tensor:
    """Single-sample estimate [B, T] of KL(policy || reference) at decisions drawn from the policy.

    With d = logp - ref_logp clamped to +-20 (Schulman, "Approximating KL divergence", 2020):

        k1 = d            k2 = d^2 / 2            k3 = exp(-d) + d - 1, unbiased like k1 and never negative
        absolute = |d|, not clamped

    As a loss only k2 has the gradient of the KL in expectation; that of k1 is 0 and that of k3 is KL(reference ||
    policy)'s. With a `mask` [B, T], entries outside it are 0 without gradient, whatever they hold.

    Raises ValueError for an unknown kind.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}; got {kind!r}")
    if mask is not None:
        logp, ref_logp = logp.where(mask.bool(), 0), ref_logp.where(mask.bool(), 0)
    if kind == "absolute":
        return (logp - ref_logp).abs()
    d = (logp - ref_logp).clamp(-BOUND, BOUND)
    if kind == "k1":
        return d
    return d.square() / 2 if kind == "k2" else torch.expm1(-d) + d


def gaussian_kl(mean: Tensor, ref_mean: Tensor, std: Tensor, *, reduction: str = "mean") -> Tensor:
    """Exact KL [B] between Normal(mean, std) and Normal(ref_mean, std): |mean - ref_mean|^2 / (2 std^2).

    `mean`, `ref_mean`: [B, ...]; the elements of one rollout are averaged ("mean", as denoising log-likelihoods are) or
    summed. `std` is positive and includes sqrt(-dt): [B], 0-d, or any shape of two or more axes that broadcasts.

    Raises ValueError for an unknown reduction, and for a 1-d std that is not [B].
    """
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}; got {reduction!r}")
    if std.dim() == 1:
        if len(std) != len(mean):
            raise ValueError(f"std has {len(std)} entries for {len(mean)} rollouts")
        std = std.view(-1, *[1] * (mean.dim() - 1))
    elements = (((mean - ref_mean) / std).square() / 2).reshape(len(mean), -1)
    return elements.mean(1) if reduction == "mean" else elements.sum(1)


def token_divergence(logp: Tensor, old_logp: Tensor, *, kind: str = "tv") -> Tensor:
    """Detached divergence [B, T] of "this token or any other", for the surrogate divergence_mask (arXiv 2602.04879).

    With p, q the probabilities of the sampled token, now and in the old policy:

        tv = |p - q|            kl = q log(q / p) + (1 - q) log((1 - q) / (1 - p))

    Raises ValueError for an unknown kind.
    """
    if kind not in DIVERGENCES:
        raise ValueError(f"kind must be one of {', '.join(DIVERGENCES)}; got {kind!r}")
    logp, old_logp = logp.detach(), old_logp.detach()
    p, q = logp.exp(), old_logp.exp()
    if kind == "tv":
        return (p - q).abs()
    tiny = torch.finfo(p.dtype).tiny
    rest_p, rest_q = -torch.expm1(logp), -torch.expm1(old_logp)
    rest = torch.xlogy(rest_q, rest_q) - torch.xlogy(rest_q, rest_p.clamp(min=tiny))
    return (q * (old_logp - logp) + rest).clamp(min=0)


def masked_distance(x: Tensor, other: Tensor, mask: Tensor) -> Tensor:
    """[rollout, decision] mean squared difference of x and `other`, [rollout, decision, channel, ..., height, width],
    where `mask` is 1; it broadcasts to them. 0 where it is 1 nowhere."""
    weight = mask.expand_as(x)
    added = ((x - other).square() * weight).flatten(2).sum(2)
    return added / weight.flatten(2).sum(2).clamp(min=1)


def listed_divergence(student: Tensor, teacher: Tensor, *, direction: Direction, whole: bool = False) -> Tensor:
    """Computes the KL divergence [...] of each decision, with its gradient in `student`.

    student, teacher: log-probabilities of the same alternatives, [..., k]; all others are one more alternative, of the
    probability that is left, so that the result is a lower bound of the KL over the whole list (the log-sum
    inequality). whole: the alternatives are all that there are. reverse: KL(student || teacher); forward: KL(teacher ||
    student).
    """
    if not whole:
        student, teacher = (torch.cat([logp, log_rest(logp)], -1) for logp in (student, teacher))
    first, second = (student, teacher) if direction == "reverse" else (teacher, student)
    return (first.exp() * (first - second)).sum(-1)


def log_rest(logp: Tensor) -> Tensor:
    """Returns the log of the probability that the alternatives logp [..., k] leave to others, [..., 1]; at least
    log `LEAST`."""
    return (1 - logp.exp().sum(-1, keepdim=True)).clamp(min=LEAST).log()


def sampled_divergence(
    logp: Tensor, old_logp: Tensor, teacher: Tensor, *, direction: Direction
) -> tuple[Tensor, Tensor]:
    """Returns what is minimised, and the estimate of the KL divergence without gradient; each like `logp`.

    logp, old_logp, teacher: of decisions that the policy of old_logp sampled, under the student, that policy and the
    teacher. In expectation over these decisions the gradient is that of the KL divergence of the next decision:

        reverse   r d                  r = exp(logp - old_logp), d = logp - teacher detached    gradient r d dlogp
        forward   -w (logp - teacher)  w = exp(teacher - old_logp)                              gradient -w dlogp

    Exponents and the weight d are clamped at +-20.
    """
    gap = logp - teacher
    if direction == "reverse":
        values = (logp - old_logp).clamp(-BOUND, BOUND).exp() * gap.detach().clamp(-BOUND, BOUND)
    else:
        values = -(teacher - old_logp).clamp(-BOUND, BOUND).exp() * gap
    return values, values.detach()

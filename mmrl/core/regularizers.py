"""KL and other divergences between policies: single-sample estimates, sums over listed tokens, and the exact KL of
Gaussian steps.

Shapes: B rollouts, T decisions.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from mmrl.core.ratios import BOUND

KINDS = ("k1", "k2", "k3", "absolute")
DIVERGENCES = ("tv", "kl")
REDUCTIONS = ("mean", "sum")
Direction = Literal["reverse", "forward"]
MIN_REMAINING = 1e-7  # lower bound of the probability of unlisted tokens, about the fp32 rounding error of the sum


def kl_estimate(logp: Tensor, ref_logp: Tensor, *, kind: str = "k3", mask: Tensor | None = None) -> Tensor:
    """Estimates KL(policy || reference) from one sample per decision, which the policy drew. Returns [B, T].

    logp, ref_logp: [B, T], log-probabilities under the policy and the reference. With d = logp - ref_logp clamped to
    +-20 (Schulman, "Approximating KL divergence", 2020):

        k1 = d            k2 = d^2 / 2            k3 = exp(-d) + d - 1, unbiased like k1 and never negative
        absolute = |d|, not clamped

    As a loss, only k2 has the gradient of the KL in expectation; the gradient of k1 is 0 in expectation, and that of k3
    is the gradient of KL(reference || policy). mask: [B, T]; entries outside it are 0 without a gradient, even if NaN.

    Raises ValueError if the kind is unknown.
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
    """Computes the KL of Normal(mean, std) and Normal(ref_mean, std), |mean - ref_mean|^2 / (2 std^2). Returns [B].

    mean, ref_mean: [B, ...]; std: positive, [B], 0-d, or a shape of at least two axes that broadcasts; for a denoising
    step it includes sqrt(-dt). reduction: over the elements of a rollout, "mean" or "sum"; denoising log-likelihoods
    use the mean.

    Raises ValueError if the reduction is unknown, or if a 1-d std is not [B].
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
    """Computes the divergence of two policies on the event "this token or another one" (arXiv 2602.04879).

    logp, old_logp: [B, T]. Returns [B, T], detached. With p, q the probabilities of the sampled token under the current
    and the old policy:

        tv = |p - q|            kl = q log(q / p) + (1 - q) log((1 - q) / (1 - p))

    Raises ValueError if the kind is unknown.
    """
    if kind not in DIVERGENCES:
        raise ValueError(f"kind must be one of {', '.join(DIVERGENCES)}; got {kind!r}")
    logp, old_logp = logp.detach(), old_logp.detach()
    p, q = logp.exp(), old_logp.exp()
    if kind == "tv":
        return (p - q).abs()
    tiny = torch.finfo(p.dtype).tiny
    not_p, not_q = -torch.expm1(logp), -torch.expm1(old_logp)  # 1 - p, 1 - q
    other_tokens = torch.xlogy(not_q, not_q) - torch.xlogy(not_q, not_p.clamp(min=tiny))
    return (q * (old_logp - logp) + other_tokens).clamp(min=0)


def masked_distance(x: Tensor, other: Tensor, mask: Tensor) -> Tensor:
    """Computes the mean squared difference of x and `other` over a mask. Returns [rollout, decision].

    x, other: [rollout, decision, channel, ..., height, width]; mask: 1 where elements are used, broadcasts to x. An
    empty mask gives 0.
    """
    weight = mask.expand_as(x)
    total = ((x - other).square() * weight).flatten(2).sum(2)
    return total / weight.flatten(2).sum(2).clamp(min=1)


def top_k_kl(student: Tensor, teacher: Tensor, *, direction: Direction, complete: bool = False) -> Tensor:
    """Computes the KL divergence of student and teacher from the log-probabilities of k tokens. Returns [...].

    student, teacher: log-probabilities of the same k tokens, [..., k]; the gradient flows to `student`. direction:
    "reverse" is KL(student || teacher), "forward" KL(teacher || student). All unlisted tokens are merged into one with
    the remaining probability, so the result is a lower bound of the full KL (log-sum inequality). complete: the k
    tokens are the whole vocabulary, and nothing is merged.
    """
    if not complete:
        student, teacher = (torch.cat([logp, log_remaining_probability(logp)], -1) for logp in (student, teacher))
    log_p, log_q = (student, teacher) if direction == "reverse" else (teacher, student)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def log_remaining_probability(logp: Tensor) -> Tensor:
    """Returns log(1 - sum of the probabilities) of k listed tokens, logp [..., k], as [..., 1]; never below
    log `MIN_REMAINING`."""
    return (1 - logp.exp().sum(-1, keepdim=True)).clamp(min=MIN_REMAINING).log()


def log_support(logp: Tensor, reference: Tensor, min_probability: float) -> Tensor:
    """Computes the log of the probability of a support: the listed tokens that the reference finds likely. Returns
    [...].

    logp, reference: log-probabilities of the same k tokens, [..., k]; the gradient flows to `logp`. The support is
    those of them with a probability of at least `min_probability` under the reference, and always the likeliest one.
    """
    supported = (reference.exp() >= min_probability) | (reference >= reference.amax(-1, keepdim=True))
    return logp.where(supported, -torch.inf).logsumexp(-1)


def sampled_kl_loss(logp: Tensor, old_logp: Tensor, teacher: Tensor, *, direction: Direction) -> tuple[Tensor, Tensor]:
    """Computes a single-sample loss for the KL divergence of student and teacher. Returns it and its detached values.

    logp, old_logp, teacher: log-probabilities of the sampled tokens under the student, the policy that sampled them and
    the teacher, all of one shape, which the results have too. In expectation the gradient is that of the KL:

        reverse   r d                  r = exp(logp - old_logp), d = logp - teacher detached    gradient r d dlogp
        forward   -w (logp - teacher)  w = exp(teacher - old_logp)                              gradient -w dlogp

    Exponents and the weight d are clamped to +-20.
    """
    difference = logp - teacher
    if direction == "reverse":
        values = (logp - old_logp).clamp(-BOUND, BOUND).exp() * difference.detach().clamp(-BOUND, BOUND)
    else:
        values = -(teacher - old_logp).clamp(-BOUND, BOUND).exp() * difference
    return values, values.detach()

"""Errors of implicit policies, which DiffusionNFT's objective compares; see `surrogates.contrast`."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class MatchedSamples(Protocol):
    """Noisy samples with the predictions for them; see `mmrl.rollouts.MatchingTargets`."""

    noisy: Tensor
    prediction: Tensor
    old: Tensor
    data: Tensor
    sigma: Tensor
    signal: Tensor
    noise_space: bool


def implicit_errors(matching: MatchedSamples, beta: float) -> tuple[Tensor, Tensor]:
    """[rollout, decision] each: how far from the data the policies (1 - b) old + b v and (1 + b) old - b v lead, with
    b = `beta` (DiffusionNFT, arXiv 2509.16117). Gradients flow to matching.prediction v.

    A prediction p leads to x - s p, or to (x - s p) / signal where the noise is predicted. The squared error is divided
    by its own detached mean absolute size, which keeps noise levels comparable. At v = old both are equal, bit for bit.
    """
    away = beta * (matching.prediction - matching.old)
    one, other = (_error(matching, p) for p in (matching.old + away, matching.old - away))
    return one, other


def contrast(
    positive: Tensor, negative: Tensor, advantages: Tensor, *, strength: float = 1.0, bound: float = 5.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """DiffusionNFT's forward-process objective (arXiv 2509.16117): values [B, T] to minimise, bound / strength times

        r positive + (1 - r) negative,      r = clamp(A / (2 bound) + 1/2, 0, 1)

    `positive`, `negative` [B, T]: matching errors of the implicit policies (1 - b) v_old + b v and
    (1 + b) v_old - b v, with b = `strength`; `advantages` [B] or [B, T], detached. At v = v_old and r = 1/2 the
    gradient is 0. Statistics: "optimality" r.
    """
    advantages = advantages.detach()
    a = advantages[:, None] if advantages.dim() == 1 else advantages
    r = optimality(a, bound).expand_as(positive)
    return bound / strength * (r * positive + (1 - r) * negative), {"optimality": r.to(positive.dtype)}


def optimality(advantages: Tensor, bound: float) -> Tensor:
    """The weight of a sample as a positive one, 0 to 1: clamp(A / (2 bound) + 1/2, 0, 1), of any shape."""
    return (advantages / (2 * bound) + 0.5).clamp(0, 1)


def predicted_data(matching: MatchedSamples, prediction: Tensor) -> Tensor:
    """[rollout, decision, ...] the data that a prediction for the noisy samples leads to."""
    ones = [1] * (prediction.dim() - 2)
    s, signal = (part.reshape(*part.shape, *ones) for part in (matching.sigma, matching.signal))
    estimate = matching.noisy - s * prediction
    return estimate / signal if matching.noise_space else estimate


def _error(matching: MatchedSamples, prediction: Tensor) -> Tensor:
    error = (predicted_data(matching, prediction) - matching.data).flatten(2)
    size = error.detach().abs().mean(2).clamp(min=1e-5)
    return error.square().mean(2) / size

"""DiffusionNFT's objective (arXiv 2509.16117): matching errors of two implicit policies, weighed by the advantage."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class MatchedSamples(Protocol):
    """Noisy samples and the network's predictions for them; see `mmrl.rollouts.MatchingTargets`."""

    noisy: Tensor  # [rollout, decision, ...], as prediction, old and data
    prediction: Tensor  # of the current policy, with a gradient
    old: Tensor  # prediction of the policy that made the rollouts
    data: Tensor  # clean samples
    sigma: Tensor  # [rollout, decision], coefficient of the prediction
    signal: Tensor  # [rollout, decision], coefficient of the data
    noise_space: bool  # the network predicts noise, not velocity


def implicit_errors(matching: MatchedSamples, beta: float) -> tuple[Tensor, Tensor]:
    """Computes the matching errors of DiffusionNFT's two implicit policies, each [rollout, decision].

    With v = matching.prediction, which gets the gradient, and b = `beta`, the positive policy predicts
    (1 - b) old + b v and the negative one (1 + b) old - b v. A prediction p estimates the data as x - s p, or as
    (x - s p) / signal if the network predicts noise. The squared error of that estimate is divided by the detached mean
    absolute error, so that noise levels are comparable. At v = old both errors are equal, bit for bit.
    """
    offset = beta * (matching.prediction - matching.old)
    positive = _normalized_error(matching, matching.old + offset)
    negative = _normalized_error(matching, matching.old - offset)
    return positive, negative


def contrast(
    positive: Tensor, negative: Tensor, advantages: Tensor, *, strength: float = 1.0, bound: float = 5.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """Computes DiffusionNFT's objective (arXiv 2509.16117). Returns values [B, T] to minimize and statistics [B, T].

        value = bound / strength (r positive + (1 - r) negative),      r = clamp(A / (2 bound) + 1/2, 0, 1)

    positive, negative: [B, T], the two errors that `implicit_errors` returns for beta = `strength`; advantages: [B] or
    [B, T], detached here. Where the prediction equals the old one and r = 1/2, the gradient is 0. The statistic
    "optimality" is r.
    """
    advantages = advantages.detach()
    a = advantages[:, None] if advantages.dim() == 1 else advantages
    r = optimality_weight(a, bound).expand_as(positive)
    return bound / strength * (r * positive + (1 - r) * negative), {"optimality": r.to(positive.dtype)}


def optimality_weight(advantages: Tensor, bound: float) -> Tensor:
    """Returns the weight of a sample as a positive example: clamp(A / (2 bound) + 1/2, 0, 1), shaped as advantages."""
    return (advantages / (2 * bound) + 0.5).clamp(0, 1)


def predict_data(matching: MatchedSamples, prediction: Tensor) -> Tensor:
    """Estimates the clean data [rollout, decision, ...] from the noisy samples and a prediction of the same shape."""
    trailing = [1] * (prediction.dim() - 2)
    sigma, signal = (level.reshape(*level.shape, *trailing) for level in (matching.sigma, matching.signal))
    estimate = matching.noisy - sigma * prediction
    return estimate / signal if matching.noise_space else estimate


def _normalized_error(matching: MatchedSamples, prediction: Tensor) -> Tensor:
    """Returns the squared error of the data estimate over its detached mean absolute error, [rollout, decision]."""
    error = (predict_data(matching, prediction) - matching.data).flatten(2)
    mean_absolute = error.detach().abs().mean(2).clamp(min=1e-5)
    return error.square().mean(2) / mean_absolute

"""Log-likelihoods of denoised samples: of steps of chains and of final samples, for all policies that denoise.

Samples are images, videos or chunks of actions: latents are [rollout, decision, ...] here, of any shape.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mmrl.samplers.chain import DRAWS, Sampler, gaussian, mixed
from mmrl.samplers.settings import Space, StepWeight, Window
from mmrl.samplers.transitions import Coefficients, compare_steps, gaussian_step, reduce_elements, step_kl
from mmrl.samplers.windows import usable_steps

HALF = 0.5  # a Gaussian of this variance has the log-density -|x - mean|^2 - log(pi) / 2


class Score(NamedTuple):
    """Columns of decisions, [rollout, decision] each, under their names in `mmrl.rollouts.Replay`."""

    logp: Tensor
    log_ratio: Tensor  # to the old policy, in the form that is exactly 0 on-policy
    prediction: Tensor  # [rollout, decision, ...] detached
    std: Tensor | None = None  # of a Gaussian step
    divergence: Tensor | None = None  # exact KL to the old policy, with its gradient
    reference_kl: Tensor | None = None  # exact KL to the reference policy
    reference_log_ratio: Tensor | None = None  # to the reference policy, exactly 0 where it is the present one
    reference_error: Tensor | None = None  # squared distance to the reference policy's prediction

    @property
    def columns(self) -> dict[str, Tensor]:
        """Returns the columns that are not None, by name."""
        return {name: value for name, value in self._asdict().items() if value is not None}


def chain_likelihood(
    v: Tensor,
    x: Tensor,
    x_next: Tensor,
    step: Coefficients,
    *,
    old: Tensor | None = None,
    reference: Tensor | None = None,
    counted: Tensor | None = None,
    reduction: str = "mean",
    unscaled: bool = False,
) -> Score:
    """Scores the stochastic steps from x to x_next by the network's predictions v; each [rollout, decision, ...] fp32.

    step: each [rollout, decision]. old, reference: predictions of the policy that made the rollouts (None: v itself)
    and of the reference policy. counted: bool, what broadcasts to x; the other elements are taken as equal under all
    policies and where the old one expects them, and they have no gradient. unscaled: logp and log-ratios are those of
    -|x_next - mean|^2, without the factor 1 / (2 std^2) and the constants of the density; divergences stay exact.
    Gradients flow to `v`.
    """
    size, shape = v.shape[:2], v.shape
    before = v.detach() if old is None else old.to(v)
    if counted is not None:
        v = v.where(counted, before)
    x, x_next, flat_v, before = (part.flatten(0, 1) for part in (x, x_next, v, before))
    step = Coefficients(*(part.flatten() for part in step))
    if counted is not None:
        expected, _, _ = gaussian_step(x, before, step, noise=torch.zeros_like(x), keep_mean=False)
        x_next = x_next.where(counted.expand(shape).flatten(0, 1), expected)
    scored = step._replace(std=torch.full_like(step.std, HALF**0.5)) if unscaled else step
    compared = compare_steps(x, flat_v, before, scored, x_next, reduction=reduction)
    constant = math.log(math.pi) / 2 * (1 if reduction == "mean" else x[0].numel()) if unscaled else 0.0
    apart = step_kl(flat_v, before, step, reduction=reduction) if unscaled else compared.kl
    score = Score(
        logp=(compared.logp + constant).view(size),
        log_ratio=compared.log_ratio.view(size),
        prediction=v.detach(),
        std=step.std.to(v.device).view(size),
        divergence=apart.view(size),
    )
    if reference is None:
        return score
    reference = _equal_elsewhere(reference, v, counted)
    kl = step_kl(flat_v, reference.flatten(0, 1), step, reduction=reduction)
    ratio = compare_steps(x, flat_v, reference.flatten(0, 1), scored, x_next, reduction=reduction).log_ratio
    return score._replace(
        reference_kl=kl.view(size),
        reference_log_ratio=ratio.view(size),
        reference_error=_squared(v - reference, reduction),
    )


def matching_likelihood(
    v: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    old: Tensor | None = None,
    reference: Tensor | None = None,
    counted: Tensor | None = None,
    reduction: str = "mean",
) -> Score:
    """Scores predictions v of noisy samples by -w |v - target|^2; v and target are [rollout, decision, ...], the weight
    w is [rollout, decision] (None: 1). The rest is as in `chain_likelihood`; elements that are not counted add
    nothing."""
    before = v.detach() if old is None else old.to(v)
    w = 1.0 if weight is None else weight

    def error(values: Tensor) -> Tensor:
        return _reduced(values if counted is None else values.where(counted, 0), reduction)

    def ratio_to(other: Tensor) -> Tensor:
        """Returns the log-ratio as a product, (v - other) (v + other - 2 target), which is exactly 0 on-policy."""
        return -w * error((v - other) * (v + other - 2 * target))

    score = Score(logp=-w * error((v - target).square()), log_ratio=ratio_to(before), prediction=v.detach())
    if reference is None:
        return score
    reference = _equal_elsewhere(reference, v, counted)
    return score._replace(reference_log_ratio=ratio_to(reference), reference_error=_squared(v - reference, reduction))


def noisy_samples(data: Tensor, noise: Tensor, sigma: Tensor, space: Space) -> tuple[Tensor, Tensor]:
    """Returns samples at noise levels sigma [rollout, decision], and the network's targets at them: the velocity or the
    noise. data broadcasts to noise [rollout, decision, ...], fp32."""
    s, signal = (per_element(part.float().to(noise.device), noise) for part in (sigma, signal_at(sigma, space)))
    return signal * data + s * noise, noise if space == "noise" else noise - data


def signal_at(sigma: Tensor, space: Space) -> Tensor:
    """Returns the factor of the data at noise level sigma, like sigma."""
    return (1 - sigma.double().square()).sqrt() if space == "noise" else 1 - sigma


def per_element(value: Tensor, like: Tensor) -> Tensor:
    """Reshapes [rollout, decision] to as many dimensions as `like` [rollout, decision, ...]."""
    return value.reshape(*value.shape, *[1] * (like.dim() - value.dim()))


def draw_noises(seeds: Sequence[int], draws: int, shape: tuple[int, ...]) -> Tensor:
    """Draws standard normal noise [rollout, draw, *shape] fp32, from the seeds alone."""
    return torch.stack([torch.cat([gaussian([seed], DRAWS - j, shape) for j in range(draws)]) for seed in seeds])


def stratified(seed: int, count: int, number: int = 0) -> Tensor:
    """Draws uniform numbers [count] in [0, 1), one in each of `count` equal parts, from `seed` and `number`."""
    generator = torch.Generator().manual_seed(mixed(seed, 1000 + number))
    return (torch.arange(count) + torch.rand(count, generator=generator)) / count


def step_weights(kind: StepWeight, sampler: Sampler, window: Window) -> Tensor | None:
    """Returns the loss weights of a chain's steps [steps], of mean 1 over the usable steps; None: all 1."""
    if kind == "none":
        return None
    usable = list(usable_steps(window, sampler.std))
    table = sampler.std if kind == "std" else (-1 / sampler.grid.sigmas.diff()).float()
    return table / table[usable].mean()


def _squared(difference: Tensor, reduction: str) -> Tensor:
    return _reduced(difference.square(), reduction)


def _reduced(values: Tensor, reduction: str) -> Tensor:
    """Reduces [rollout, decision, ...] to [rollout, decision]."""
    return reduce_elements(values.flatten(0, 1), reduction).view(values.shape[:2])


def _equal_elsewhere(reference: Tensor, v: Tensor, counted: Tensor | None) -> Tensor:
    """Returns the reference policy's prediction, with v's own values where elements do not count."""
    reference = reference.to(v)
    return reference if counted is None else reference.where(counted, v.detach())

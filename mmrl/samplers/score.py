"""Log-likelihoods of denoised samples, for all policies that denoise: of the steps of a chain, or of the final sample.

Samples are images, videos or chunks of actions. Latents are [rollout, decision, ...], of any shape.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mmrl.samplers.chain import DRAWS, Sampler, derive_seed, gaussian_noise
from mmrl.samplers.settings import Space, StepWeight, Window
from mmrl.samplers.transitions import Coefficients, compare_steps, gaussian_step, reduce_elements, step_kl
from mmrl.samplers.windows import usable_steps

HALF = 0.5  # a Gaussian of this variance has the log-density -|x - mean|^2 - log(pi) / 2


class Score(NamedTuple):
    """Log-likelihoods and divergences of decisions, [rollout, decision] each, named as in `mmrl.rollouts.Replay`."""

    logp: Tensor
    log_ratio: Tensor  # log-ratio to the old policy, exactly 0 on-policy
    prediction: Tensor  # the network's, [rollout, decision, ...], detached
    std: Tensor | None = None  # of a Gaussian step
    divergence: Tensor | None = None  # exact KL to the old policy, with its gradient
    reference_kl: Tensor | None = None  # exact KL to the reference policy
    reference_log_ratio: Tensor | None = None  # exactly 0 if the reference has the current weights
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
    element_mask: Tensor | None = None,
    reduction: str = "mean",
    unscaled: bool = False,
) -> Score:
    """Scores the stochastic steps of chains, from x to x_next, under the network's predictions v.

    v, x, x_next: [rollout, decision, ...] fp32. step: coefficients [rollout, decision]. old, reference: the predictions
    of the policy that sampled the rollouts (None: v itself) and of the reference policy. element_mask: bool, broadcasts
    to x; False elements add no divergence and no gradient, as if all policies agreed on them. unscaled: score a step by
    -|x_next - mean|^2, without the factor 1 / (2 std^2) and the constants of the density; divergences stay exact.
    Gradients flow to `v`.
    """
    size, shape = v.shape[:2], v.shape
    old_v = v.detach() if old is None else old.to(v)
    if element_mask is not None:
        v = v.where(element_mask, old_v)
    x, x_next, flat_v, old_v = (part.flatten(0, 1) for part in (x, x_next, v, old_v))
    step = Coefficients(*(part.flatten() for part in step))
    if element_mask is not None:
        # masked elements end at the old policy's mean, which all policies then predict, so they add no likelihood ratio
        expected, _, _ = gaussian_step(x, old_v, step, noise=torch.zeros_like(x), keep_mean=False)
        x_next = x_next.where(element_mask.expand(shape).flatten(0, 1), expected)
    scored = step._replace(std=torch.full_like(step.std, HALF**0.5)) if unscaled else step
    compared = compare_steps(x, flat_v, old_v, scored, x_next, reduction=reduction)
    # an unscaled step is scored as a Gaussian of variance 1/2, whose constant, log(pi) / 2 an element, is added back
    constant = math.log(math.pi) / 2 * (1 if reduction == "mean" else x[0].numel()) if unscaled else 0.0
    divergence = step_kl(flat_v, old_v, step, reduction=reduction) if unscaled else compared.kl
    score = Score(
        logp=(compared.logp + constant).view(size),
        log_ratio=compared.log_ratio.view(size),
        prediction=v.detach(),
        std=step.std.to(v.device).view(size),
        divergence=divergence.view(size),
    )
    if reference is None:
        return score
    reference = _masked_reference(reference, v, element_mask)
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
    element_mask: Tensor | None = None,
    reduction: str = "mean",
) -> Score:
    """Scores predictions v of noisy samples by -w |v - target|^2.

    v, target: [rollout, decision, ...]. weight: w, [rollout, decision] (None: 1). The other arguments are those of
    `chain_likelihood`; elements with a False `element_mask` add nothing.
    """
    old_v = v.detach() if old is None else old.to(v)
    w = 1.0 if weight is None else weight

    def error(values: Tensor) -> Tensor:
        """Reduces values [rollout, decision, ...] over the elements of the mask, to [rollout, decision]."""
        return _reduced(values if element_mask is None else values.where(element_mask, 0), reduction)

    def ratio_to(other: Tensor) -> Tensor:
        """Returns the log-ratio to the policy that predicts `other`, from the product (v - other) (v + other - 2
        target): it is exactly 0 if other is v."""
        return -w * error((v - other) * (v + other - 2 * target))

    score = Score(logp=-w * error((v - target).square()), log_ratio=ratio_to(old_v), prediction=v.detach())
    if reference is None:
        return score
    reference = _masked_reference(reference, v, element_mask)
    return score._replace(reference_log_ratio=ratio_to(reference), reference_error=_squared(v - reference, reduction))


def noisy_samples(data: Tensor, noise: Tensor, sigma: Tensor, space: Space) -> tuple[Tensor, Tensor]:
    """Returns samples noised to the levels sigma [rollout, decision], and the network's targets for them: the velocity
    or the noise, according to `space`.

    data: broadcasts to noise [rollout, decision, ...], fp32.
    """
    s, signal = (per_element(part.float().to(noise.device), noise) for part in (sigma, signal_at(sigma, space)))
    return signal * data + s * noise, noise if space == "noise" else noise - data


def signal_at(sigma: Tensor, space: Space) -> Tensor:
    """Returns the factor of the data in a sample of noise level sigma, of sigma's shape."""
    return (1 - sigma.double().square()).sqrt() if space == "noise" else 1 - sigma


def per_element(value: Tensor, like: Tensor) -> Tensor:
    """Appends dimensions of size 1 to value [rollout, decision], as many as `like` [rollout, decision, ...] has
    more."""
    return value.reshape(*value.shape, *[1] * (like.dim() - value.dim()))


def draw_noises(seeds: Sequence[int], draws: int, shape: tuple[int, ...]) -> Tensor:
    """Samples standard normal noise [rollout, draw, *shape] fp32, from the seeds alone."""
    return torch.stack([torch.cat([gaussian_noise([seed], DRAWS - j, shape) for j in range(draws)]) for seed in seeds])


def stratified(seed: int, count: int, number: int = 0) -> Tensor:
    """Samples uniform numbers [count], one in each of `count` equal parts of [0, 1), from `seed` and `number`."""
    # 1000: apart from the numbers of other seeds that are derived from `seed`
    generator = torch.Generator().manual_seed(derive_seed(seed, 1000 + number))
    return (torch.arange(count) + torch.rand(count, generator=generator)) / count


def step_weights(kind: StepWeight, sampler: Sampler, window: Window) -> Tensor | None:
    """Returns the weight [steps] of each step of a chain in the loss, of mean 1 over the usable steps; None: all 1.
    kind: proportional to the std of the step ("std"), or to 1 / the decrease of sigma ("inverse_dt")."""
    if kind == "none":
        return None
    usable = list(usable_steps(window, sampler.std))
    weights = sampler.std if kind == "std" else (-1 / sampler.grid.sigmas.diff()).float()
    return weights / weights[usable].mean()


def _squared(difference: Tensor, reduction: str) -> Tensor:
    """Returns the mean or sum of squares over elements, [rollout, decision], of `difference` [rollout, decision,
    ...]."""
    return _reduced(difference.square(), reduction)


def _reduced(values: Tensor, reduction: str) -> Tensor:
    """Averages or sums [rollout, decision, ...] over elements; returns [rollout, decision]."""
    return reduce_elements(values.flatten(0, 1), reduction).view(values.shape[:2])


def _masked_reference(reference: Tensor, v: Tensor, element_mask: Tensor | None) -> Tensor:
    """Returns the reference policy's prediction, replaced by v where element_mask is False."""
    reference = reference.to(v)
    return reference if element_mask is None else reference.where(element_mask, v.detach())

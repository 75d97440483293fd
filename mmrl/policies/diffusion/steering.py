"""Particle search: chains of a prompt are resampled by their expected reward while they are denoised."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmrl.errors import UserError
from mmrl.policies.diffusion.decisions.records import decoded_samples, noise_of
from mmrl.policies.diffusion.family import ConditionInputs
from mmrl.policies.diffusion.policy import DiffusionPolicy
from mmrl.rollouts import Prompt, Sample
from mmrl.samplers.chain import INITIAL, Sampler, derive_seed, gaussian_noise, predicted_data, run
from mmrl.samplers.settings import AllSteps, DenoisingTransition, Euler
from mmrl.samplers.windows import usable_steps

Score = Callable[[Sequence[Sample], Tensor], Tensor]  # samples, [rollout] their prompt -> [rollout] reward


@dataclass(frozen=True)
class Steering:
    count: int  # chains of each prompt
    every: int  # steps of the chain between two resamplings
    strength: float  # factor of rewards in the logits of resampling
    transition: DenoisingTransition  # the stochastic step


@torch.no_grad()
def steered(
    policy: DiffusionPolicy, prompts: Sequence[Prompt], seeds: Sequence[int], steering: Steering, score: Score
) -> list[Sample]:
    """Returns the best of `steering.count` images of each prompt, from its seed alone, with the steps, size and
    guidance of evaluation. Raises UserError for a transition that does not fit the model."""
    final, particle_prompts, group = particles(policy, prompts, seeds, steering, score)
    samples = decoded_samples(particle_prompts, policy.family.decode(final).float().cpu())
    earned = score(samples, group).view(len(prompts), steering.count)
    return [samples[i * steering.count + int(best)] for i, best in enumerate(earned.argmax(1))]


def particles(
    policy: DiffusionPolicy, prompts: Sequence[Prompt], seeds: Sequence[int], steering: Steering, score: Score
) -> tuple[Tensor, list[Prompt], Tensor]:
    """Returns the final latents [particle, ...], `count` of each prompt in a row, and their prompts, as such and as
    indices."""
    family, settings, shape = policy.family, policy.denoising, policy.evaluation_shape
    if steering.transition.space != family.space:
        raise UserError(
            f"sample.search.transition.type={steering.transition.type} is not for a model that predicts {family.space}"
        )
    guidance = settings.guidance if settings.evaluation_guidance is None else settings.evaluation_guidance
    sampler = Sampler(family.grid(settings.evaluation_steps, shape), steering.transition, Euler(), family.space)
    count, last = steering.count, len(sampler.grid)
    particle_prompts = [prompt for prompt in prompts for _ in range(count)]
    group = torch.arange(len(prompts)).repeat_interleave(count)
    particle_seeds = [derive_seed(int(seed), n) for seed in seeds for n in range(count)]
    predict = policy.network.predictor(sampler, [ConditionInputs.of(prompt) for prompt in particle_prompts], guidance)
    drawn = set(usable_steps(AllSteps(), sampler.std))
    x = gaussian_noise(particle_seeds, INITIAL, shape).to(policy.device)
    earned = torch.zeros(len(particle_prompts))
    points = [*range(0, last, steering.every), last]
    for start, stop in zip(points, points[1:], strict=False):
        window = [point for point in range(start, stop) if point in drawn]
        rows = [window] * len(particle_prompts)
        x = run(
            predict,
            x,
            sampler,
            rows,
            noise_of(particle_seeds, shape),
            start=[start] * len(particle_prompts),
            stop=[stop] * len(particle_prompts),
        ).final
        if stop == last:
            break
        at = torch.full((len(particle_prompts),), stop)
        v = predict(x, at, torch.arange(len(particle_prompts))).float()
        expected = predicted_data(x, v, sampler.grid.sigmas[at], sampler.deterministic)
        now = score(decoded_samples(particle_prompts, family.decode(expected).float().cpu()), group)
        survivors = torch.cat(
            [
                i * count
                + resampled(
                    steering.strength * (now - earned)[i * count :][:count], derive_seed(int(seed), 7000 + stop)
                )
                for i, seed in enumerate(seeds)
            ]
        )
        x, earned = x[survivors.to(x.device)], now[survivors]
    return x, particle_prompts, group


def resampled(logits: Tensor, seed: int) -> Tensor:
    """Returns the indices [particle] int64 of the particles that continue, by systematic resampling: each is drawn as
    often as its share of softmax(logits) says, to less than one. Unscored particles (-inf, or NaN) are never drawn,
    unless all are unscored."""
    scores = logits.nan_to_num(-torch.inf, neginf=-torch.inf)
    if not scores.isfinite().any():
        return torch.arange(len(logits))
    share = scores.double().softmax(0)
    offset = torch.rand((), generator=torch.Generator().manual_seed(seed), dtype=torch.double)
    positions = (torch.arange(len(logits)) + offset) / len(logits)
    return torch.searchsorted(share.cumsum(0), positions).clamp(max=len(logits) - 1)

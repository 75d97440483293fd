"""Particle search at inference: several denoising chains per prompt are resampled by the rewards of their predicted
images (Feynman-Kac steering)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmrl.errors import UserError
from mmrl.policies.diffusion.decisions.records import decoded_samples, noise_function
from mmrl.policies.diffusion.family import ConditionInputs
from mmrl.policies.diffusion.policy import DiffusionPolicy
from mmrl.rollouts import Prompt, Sample
from mmrl.samplers.chain import INITIAL, Sampler, derive_seed, gaussian_noise, predicted_data, run
from mmrl.samplers.settings import AllSteps, DenoisingTransition, Euler, transitions_for
from mmrl.samplers.windows import usable_steps

# Offset of the random numbers of resampling: they must differ from those of the particles' seeds
RESAMPLING_OFFSET = 7000
Score = Callable[[Sequence[Sample], Tensor], Tensor]  # (samples, index of their prompt [sample]) -> rewards [sample]


@dataclass(frozen=True)
class Steering:
    """Options of the particle search."""

    count: int  # chains (particles) per prompt
    every: int  # denoising steps between two resamplings
    strength: float  # logit of a particle = strength x (its reward - its reward at the previous resampling)
    transition: DenoisingTransition  # the stochastic denoising step


@torch.no_grad()
def steered(
    policy: DiffusionPolicy, prompts: Sequence[Prompt], seeds: Sequence[int], steering: Steering, score: Score
) -> list[Sample]:
    """Samples `steering.count` images per prompt with the steps, size and guidance of evaluation, and returns the one
    with the highest reward for each prompt.

    seeds: one per prompt. Raises UserError for a transition that does not fit the model.
    """
    final, particle_prompts, group = particles(policy, prompts, seeds, steering, score)
    samples = decoded_samples(particle_prompts, policy.family.decode(final).float().cpu())
    rewards = score(samples, group).view(len(prompts), steering.count)
    return [samples[i * steering.count + int(best)] for i, best in enumerate(rewards.argmax(1))]


def particles(
    policy: DiffusionPolicy, prompts: Sequence[Prompt], seeds: Sequence[int], steering: Steering, score: Score
) -> tuple[Tensor, list[Prompt], Tensor]:
    """Runs the search: after every `steering.every` steps the particles of a prompt whose expected reward rose most are
    copied, and others are dropped. Returns three values per particle: its final latents [particle, ...], its prompt,
    and the index of that prompt in `prompts`, [particle] int64. Particles of a prompt are adjacent. Arguments and
    errors: see `steered`."""
    family, settings, shape = policy.family, policy.denoising, policy.evaluation_shape
    if steering.transition.space != family.space:
        raise UserError(
            f"sample.search.transition.type={steering.transition.type} does not fit a model that predicts "
            f"{family.space}; set it to {' or '.join(transitions_for(family.space))}"
        )
    guidance = settings.guidance if settings.evaluation_guidance is None else settings.evaluation_guidance
    sampler = Sampler(family.grid(settings.evaluation_steps, shape), steering.transition, Euler(), family.space)
    count, last = steering.count, len(sampler.grid)
    particle_prompts = [prompt for prompt in prompts for _ in range(count)]
    group = torch.arange(len(prompts)).repeat_interleave(count)
    particle_seeds = [derive_seed(int(seed), n) for seed in seeds for n in range(count)]
    predict = policy.network.predictor(
        sampler, [ConditionInputs.from_prompt(prompt) for prompt in particle_prompts], guidance
    )
    stochastic_steps = set(usable_steps(AllSteps(), sampler.std))
    x = gaussian_noise(particle_seeds, INITIAL, shape).to(policy.device)
    old_rewards = torch.zeros(len(particle_prompts))
    points = [*range(0, last, steering.every), last]
    for start, stop in zip(points, points[1:], strict=False):
        window = [point for point in range(start, stop) if point in stochastic_steps]
        rows = [window] * len(particle_prompts)
        x = run(
            predict,
            x,
            sampler,
            rows,
            noise_function(particle_seeds, shape),
            start=[start] * len(particle_prompts),
            stop=[stop] * len(particle_prompts),
        ).final
        if stop == last:
            break
        row_points = torch.full((len(particle_prompts),), stop)
        v = predict(x, row_points, torch.arange(len(particle_prompts))).float()
        expected = predicted_data(x, v, sampler.grid.sigmas[row_points], sampler.deterministic)
        # intermediate rewards are those of the images that the network expects at this step
        rewards = score(decoded_samples(particle_prompts, family.decode(expected).float().cpu()), group)
        logits = steering.strength * (rewards - old_rewards)
        indices = []
        for i, seed in enumerate(seeds):
            first, resampling_seed = i * count, derive_seed(int(seed), RESAMPLING_OFFSET + stop)
            indices.append(first + resampled(logits[first : first + count], resampling_seed))
        selected = torch.cat(indices)
        x, old_rewards = x[selected.to(x.device)], rewards[selected]
    return x, particle_prompts, group


def resampled(logits: Tensor, seed: int) -> Tensor:
    """Returns the indices [particle] int64 of the particles that continue, by systematic resampling.

    The number of copies of a particle differs from softmax(logits) x number of particles by less than one. Unscored
    particles (-inf or NaN) get no copies; if all are unscored, each continues once.
    """
    scores = logits.nan_to_num(-torch.inf, neginf=-torch.inf)
    if not scores.isfinite().any():
        return torch.arange(len(logits))
    probabilities = scores.double().softmax(0)
    offset = torch.rand((), generator=torch.Generator().manual_seed(seed), dtype=torch.double)
    positions = (torch.arange(len(logits)) + offset) / len(logits)
    return torch.searchsorted(probabilities.cumsum(0), positions).clamp(max=len(logits) - 1)

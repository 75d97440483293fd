"""Particles: chains of a prompt of which the promising go on, and the others end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmrl.errors import UserError
from mmrl.policies.diffusion.decisions.records import made_samples, noise_of
from mmrl.policies.diffusion.family import ConditionInputs
from mmrl.policies.diffusion.policy import DiffusionPolicy
from mmrl.rollouts import Prompt, Sample
from mmrl.samplers.chain import INITIAL, Sampler, data_of, gaussian, mixed, run
from mmrl.samplers.settings import AllSteps, DenoisingTransition, Euler
from mmrl.samplers.windows import usable_steps

Score = Callable[[Sequence[Sample], Tensor], Tensor]  # samples, [rollout] their prompt -> [rollout] reward


@dataclass(frozen=True)
class Steering:
    count: int  # chains a prompt
    every: int  # steps of the chain between two choices
    strength: float  # of rewards in the weights
    transition: DenoisingTransition  # the stochastic step


@torch.no_grad()
def steered(
    policy: DiffusionPolicy, prompts: Sequence[Prompt], seeds: Sequence[int], steering: Steering, score: Score
) -> list[Sample]:
    """One image a prompt, from its seed alone, with the steps, size and guidance of evaluation.

    Raises UserError for a transition that is not the model's."""
    final, each, group = particles(policy, prompts, seeds, steering, score)
    made = made_samples(each, policy.family.decode(final).float().cpu())
    earned = score(made, group).view(len(prompts), steering.count)
    return [made[i * steering.count + int(best)] for i, best in enumerate(earned.argmax(1))]


def particles(
    policy: DiffusionPolicy, prompts: Sequence[Prompt], seeds: Sequence[int], steering: Steering, score: Score
) -> tuple[Tensor, list[Prompt], Tensor]:
    """The final latents [particle, ...], `count` of each prompt in a row; each one's prompt, itself and as a number."""
    family, settings, shape = policy.family, policy.denoising, policy.evaluation_shape
    if steering.transition.space != family.space:
        raise UserError(
            f"sample.search.transition.type={steering.transition.type} is not for a model that predicts {family.space}"
        )
    guidance = settings.guidance if settings.evaluation_guidance is None else settings.evaluation_guidance
    sampler = Sampler(family.grid(settings.evaluation_steps, shape), steering.transition, Euler(), family.space)
    count, last = steering.count, len(sampler.grid)
    each = [prompt for prompt in prompts for _ in range(count)]
    group = torch.arange(len(prompts)).repeat_interleave(count)
    own = [mixed(int(seed), n) for seed in seeds for n in range(count)]
    predict = policy.network.predictor(sampler, [ConditionInputs.of(prompt) for prompt in each], guidance)
    drawn = set(usable_steps(AllSteps(), sampler.std))
    x = gaussian(own, INITIAL, shape).to(policy.device)
    earned = torch.zeros(len(each))
    points = [*range(0, last, steering.every), last]
    for start, stop in zip(points, points[1:], strict=False):
        window = [point for point in range(start, stop) if point in drawn]
        rows = [window] * len(each)
        x = run(
            predict, x, sampler, rows, noise_of(own, shape), start=[start] * len(each), stop=[stop] * len(each)
        ).final
        if stop == last:
            break
        here = torch.full((len(each),), stop)
        v = predict(x, here, torch.arange(len(each))).float()
        expected = data_of(x, v, sampler.grid.sigmas[here], sampler.deterministic)
        now = score(made_samples(each, family.decode(expected).float().cpu()), group)
        kept = torch.cat(
            [
                i * count
                + resampled(steering.strength * (now - earned)[i * count :][:count], mixed(int(seed), 7000 + stop))
                for i, seed in enumerate(seeds)
            ]
        )
        x, earned = x[kept.to(x.device)], now[kept]
    return x, each, group


def resampled(logits: Tensor, seed: int) -> Tensor:
    """[particle] int64, which of as many go on: systematically drawn, so that each does as often as its share of
    softmax(logits) says, but for less than once. Of what could not be scored (-inf, or NaN after it) nothing does,
    unless that is all."""
    known = logits.nan_to_num(-torch.inf, neginf=-torch.inf)
    if not known.isfinite().any():
        return torch.arange(len(logits))
    share = known.double().softmax(0)
    offset = torch.rand((), generator=torch.Generator().manual_seed(seed), dtype=torch.double)
    places = (torch.arange(len(logits)) + offset) / len(logits)
    return torch.searchsorted(share.cumsum(0), places).clamp(max=len(logits) - 1)

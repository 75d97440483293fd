"""The image itself as the decision: replay computes its last denoising steps with a gradient, for differentiable
rewards."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mmrl.policies.diffusion.decisions.denoiser import Denoiser
from mmrl.policies.diffusion.decisions.records import ImageRecord
from mmrl.policies.diffusion.family import ConditionInputs
from mmrl.policies.diffusion.settings import ImageLastSteps
from mmrl.policies.models import NetworkCall
from mmrl.rollouts import IMAGES, Prompt, Replay, Rollouts
from mmrl.samplers.chain import Chain


class LastStepDecisions:
    """Samples images by deterministic chains. Replay computes their last steps again, with a gradient."""

    count = 1

    def __init__(self, denoiser: Denoiser, likelihood: ImageLastSteps) -> None:
        self.denoiser, self.steps = denoiser, likelihood.steps

    def rollout(self, prompts: Sequence[Prompt], group_size: int, seeds: Sequence[int], step: int) -> Rollouts:
        """Samples `group_size` rollouts per prompt. step: not used."""
        row_prompts = [p for p in prompts for _ in range(group_size)]
        # no step is stochastic, so all windows are empty
        inputs, windows = (
            [ConditionInputs.from_prompt(p) for p in row_prompts],
            list[list[int]]([[]] * len(row_prompts)),
        )
        chain = self._sample(inputs, seeds)
        return self.denoiser.rollouts(row_prompts, inputs, group_size, seeds, chain, windows, self.count)

    def _sample(self, inputs: Sequence[ConditionInputs], seeds: Sequence[int]) -> Chain:
        """Runs deterministic chains, one per input. In the result `x` holds the latents before the last steps, from
        which a replay starts, and `x_next` the final latents."""
        denoiser = self.denoiser
        no_steps: list[list[int]] = [[]] * len(inputs)
        split = [len(denoiser.sampler.grid) - self.steps] * len(inputs)  # the grid point at which the last steps begin
        x = denoiser.denoise(denoiser.initial_noise(seeds), inputs, no_steps, seeds, stop=split).final
        final = denoiser.denoise(x, inputs, no_steps, seeds, start=split).final
        return Chain(final, x[:, None], final[:, None])

    def recorded_replay(self, rollouts: Rollouts) -> None:
        """Returns None: images have no likelihood here."""

    def replay(self, rollouts: Rollouts, model: NetworkCall) -> Replay:
        """Runs the last steps under `model` and decodes the images [rollout, ...], with a gradient; returns them in
        `extras`. The steps are deterministic, so log-probabilities are 0. With guidance the gradient goes through the
        conditional pass alone, as in other replays."""
        records: list[ImageRecord] = rollouts.inputs
        denoiser, sampler = self.denoiser, self.denoiser.sampler
        x = torch.stack([record.x[0] for record in records]).to(denoiser.device)  # the latents before the last steps
        inputs, last = [record.condition_inputs for record in records], len(sampler.grid)
        stochastic = torch.zeros(len(records), dtype=torch.bool)  # no step is stochastic
        for point in range(last - self.steps, last):
            row_points = torch.full((len(records),), point)
            sigma, time = sampler.grid.sigmas[row_points], sampler.grid.times[row_points]
            v = denoiser.network.predict(model, x, sigma, time, inputs, denoiser.denoising.guidance).float()
            step = sampler.coefficients_between(row_points, row_points + 1, stochastic)
            a_x, a_v = (part.to(x).view(-1, *[1] * (x.dim() - 1)) for part in (step.a_x, step.a_v))
            x = a_x * x + a_v * v
        images = denoiser.family.decode_with_gradient(x).float()
        return Replay(torch.zeros(len(records), 1, device=denoiser.device), extras={IMAGES.name: images})

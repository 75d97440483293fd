"""One decision, the image itself: the last steps of its chain with their gradient, for rewards that have one."""

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
    """Draws images by deterministic chains; replay computes their last steps again, with a gradient."""

    count = 1

    def __init__(self, denoiser: Denoiser, likelihood: ImageLastSteps) -> None:
        self.denoiser, self.steps = denoiser, likelihood.steps

    def rollout(self, prompts: Sequence[Prompt], group_size: int, seeds: Sequence[int], step: int) -> Rollouts:
        """Draws `group_size` rollouts of each prompt; the training step changes nothing."""
        row_prompts = [p for p in prompts for _ in range(group_size)]
        inputs, windows = [ConditionInputs.of(p) for p in row_prompts], list[list[int]]([[]] * len(row_prompts))
        chain = self._draw(inputs, seeds)
        return self.denoiser.rollouts(row_prompts, inputs, group_size, seeds, chain, windows, self.count)

    def _draw(self, inputs: Sequence[ConditionInputs], seeds: Sequence[int]) -> Chain:
        """Draws chains that hold the latents before the last steps as `x`."""
        denoiser = self.denoiser
        none: list[list[int]] = [[]] * len(inputs)
        ends = [len(denoiser.sampler.grid) - self.steps] * len(inputs)
        before = denoiser.denoise(denoiser.start(seeds), inputs, none, seeds, stop=ends).final
        final = denoiser.denoise(before, inputs, none, seeds, start=ends).final
        return Chain(final, before[:, None], final[:, None])

    def recorded_replay(self, rollouts: Rollouts) -> None:
        """Returns None: sampling gives an image no likelihood."""

    def replay(self, rollouts: Rollouts, model: NetworkCall) -> Replay:
        """Computes the images [rollout, ...] that the latents before the last steps lead to under `model`. With
        guidance the unconditional half of a step has no gradient, as in every replay."""
        records: list[ImageRecord] = rollouts.inputs
        denoiser, sampler = self.denoiser, self.denoiser.sampler
        x = torch.stack([record.x[0] for record in records]).to(denoiser.device)
        inputs, last = [record.condition_inputs for record in records], len(sampler.grid)
        none = torch.zeros(len(records), dtype=torch.bool)
        for point in range(last - self.steps, last):
            at = torch.full((len(records),), point)
            sigma, time = sampler.grid.sigmas[at], sampler.grid.times[at]
            v = denoiser.network.predict(model, x, sigma, time, inputs, denoiser.denoising.guidance).float()
            step = sampler.coefficients_between(at, at + 1, none)
            a_x, a_v = (part.to(x).view(-1, *[1] * (x.dim() - 1)) for part in (step.a_x, step.a_v))
            x = a_x * x + a_v * v
        images = denoiser.family.decode_with_gradient(x).float()
        return Replay(torch.zeros(len(records), 1, device=denoiser.device), extras={IMAGES.name: images})

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
    """Draws images by deterministic chains, whose last steps are made again with their gradient."""

    count = 1

    def __init__(self, denoiser: Denoiser, likelihood: ImageLastSteps) -> None:
        self.denoiser, self.steps = denoiser, likelihood.steps

    def rollout(self, prompts: Sequence[Prompt], group_size: int, seeds: Sequence[int], step: int) -> Rollouts:
        """The same at every step of training."""
        asked = [p for p in prompts for _ in range(group_size)]
        said, windows = [ConditionInputs.of(p) for p in asked], list[list[int]]([[]] * len(asked))
        chain = self._in_two(said, seeds)
        return self.denoiser.rollouts(asked, said, group_size, seeds, chain, windows, self.count)

    def _in_two(self, said: Sequence[ConditionInputs], seeds: Sequence[int]) -> Chain:
        """Chains of which the latents before the last steps are kept, as `x`."""
        denoiser = self.denoiser
        none: list[list[int]] = [[]] * len(said)
        ends = [len(denoiser.sampler.grid) - self.steps] * len(said)
        kept = denoiser.go_on(denoiser.start(seeds), said, none, seeds, stop=ends).final
        final = denoiser.go_on(kept, said, none, seeds, start=ends).final
        return Chain(final, kept[:, None], final[:, None])

    def recorded(self, rollouts: Rollouts) -> None:
        """Nothing is said of an image when it is made."""

    def replay(self, rollouts: Rollouts, model: NetworkCall) -> Replay:
        """Images [rollout, ...] that the latents before the last steps lead to under `model`. With guidance the
        unconditional half of a step has no gradient, as in every replay."""
        records: list[ImageRecord] = rollouts.inputs
        denoiser, sampler = self.denoiser, self.denoiser.sampler
        x = torch.stack([record.x[0] for record in records]).to(denoiser.device)
        said, last = [record.asked for record in records], len(sampler.grid)
        none = torch.zeros(len(records), dtype=torch.bool)
        for point in range(last - self.steps, last):
            at = torch.full((len(records),), point)
            sigma, time = sampler.grid.sigmas[at], sampler.grid.times[at]
            v = denoiser.network.predict(model, x, sigma, time, said, denoiser.denoising.guidance).float()
            step = sampler.at(at, at + 1, none)
            a_x, a_v = (part.to(x).view(-1, *[1] * (x.dim() - 1)) for part in (step.a_x, step.a_v))
            x = a_x * x + a_v * v
        images = denoiser.family.decode_with_gradient(x).float()
        return Replay(torch.zeros(len(records), 1, device=denoiser.device), extras={IMAGES.name: images})

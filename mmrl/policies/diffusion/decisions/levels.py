"""Decisions that are noise levels: at each the final image is compared with what the network makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mmrl.errors import UserError
from mmrl.policies.diffusion.decisions.denoiser import Denoiser
from mmrl.policies.diffusion.decisions.records import ImageRecord
from mmrl.policies.diffusion.family import ConditionInputs
from mmrl.policies.diffusion.settings import ImageContrast, ImageMatching
from mmrl.policies.models import NetworkCall
from mmrl.rollouts import MATCHING, MatchingTargets, Prompt, Replay, Rollouts
from mmrl.samplers import score
from mmrl.samplers.chain import Chain


class LevelDecisions:
    """Draws images by deterministic chains, and says how well the network predicts them at drawn noise levels."""

    def __init__(self, denoiser: Denoiser, likelihood: ImageMatching | ImageContrast) -> None:
        """Raises UserError for a weight that is not the model's."""
        self.denoiser, self.likelihood, self.count = denoiser, likelihood, likelihood.draws

    def rollout(self, prompts: Sequence[Prompt], group_size: int, seeds: Sequence[int], step: int) -> Rollouts:
        """The same at every step of training."""
        denoiser, asked = self.denoiser, [p for p in prompts for _ in range(group_size)]
        said, windows = [ConditionInputs.of(p) for p in asked], list[list[int]]([[]] * len(asked))
        chain = denoiser.draw(denoiser.sampler, said, seeds, windows, denoiser.denoising.guidance)
        return self._rollouts(asked, said, group_size, seeds, chain)

    def demonstrate(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], prompt_dropout: float, dropped: str
    ) -> Rollouts:
        """See `DiffusionPolicy.demonstrate`. prompt_dropout: of which share of them the words are `dropped`."""
        missing = next((p.id for p in prompts if "target" not in p.metadata), None)
        if missing is not None:
            raise UserError(f"prompt {missing} has no image to learn from: algorithm.type=supervised needs a target")
        targets = torch.stack([p.metadata["target"] for p in prompts])
        data = self.denoiser.family.to_latents(targets.to(self.denoiser.device))
        empty = data.new_zeros(len(data), 0, *data.shape[1:])
        said = [ConditionInputs.of(p) for p in prompts]
        made = self._rollouts(prompts, said, 1, seeds, Chain(data, empty, empty), decode=False)
        for i, record in enumerate(made.inputs):
            if score.stratified(record.seed, 1)[0] < prompt_dropout:
                made.inputs[i] = replace(record, asked=record.asked.saying(dropped))
        return made

    def _rollouts(
        self,
        asked: Sequence[Prompt],
        said: Sequence[ConditionInputs],
        group_size: int,
        seeds: Sequence[int],
        chain: Chain,
        *,
        decode: bool = True,
    ) -> Rollouts:
        shared = isinstance(self.likelihood, ImageMatching) and self.likelihood.shared
        draws = [seeds[i - i % group_size] if shared else seed for i, seed in enumerate(seeds)]
        windows: list[list[int]] = [[]] * len(asked)
        return self.denoiser.rollouts(asked, said, group_size, draws, chain, windows, self.count, decode=decode)

    def recorded(self, rollouts: Rollouts) -> None:
        """Nothing is said of noise levels when rollouts are made."""

    def replay(self, rollouts: Rollouts, model: NetworkCall) -> Replay:
        """What `model` says at every noise level; one forward for all of them."""
        records: list[ImageRecord] = rollouts.inputs
        denoiser, likelihood = self.denoiser, self.likelihood
        space, device = denoiser.family.space, denoiser.device
        data = torch.stack([r.data for r in records])[:, None].to(device)
        noise = score.draw_noises([r.seed for r in records], likelihood.draws, data.shape[2:]).to(device)
        uniform = torch.stack([self._uniform(r.seed) for r in records])
        sigma, time = (part.view(uniform.shape) for part in denoiser.family.levels(uniform.flatten()))
        x, target = score.noisy_samples(data, noise, sigma, space)
        said = [r.asked for r in records for _ in range(likelihood.draws)]
        guidance = 1.0 if isinstance(likelihood, ImageMatching) else denoiser.denoising.guidance
        rows, levels, times = x.flatten(0, 1), sigma.flatten(), time.flatten()

        def predict(part: slice) -> Tensor:
            return denoiser.network.predict(model, rows[part], levels[part], times[part], said[part], guidance)

        v = denoiser.in_parts(predict, len(rows)).float().view_as(x)
        weight = None
        if isinstance(likelihood, ImageMatching):
            weight = self._weight(likelihood, uniform, sigma).to(device)
        old, ref = rollouts.old_prediction, rollouts.ref_prediction
        found: dict[str, Any] = score.matching_likelihood(
            v, target, weight, old=old, reference=ref, reduction=likelihood.reduction
        ).known
        matching = MatchingTargets(
            noisy=x,
            prediction=v,
            old=v.detach() if old is None else old.to(v),
            data=data.expand_as(x),
            sigma=sigma.float().to(device),
            signal=score.signal_at(sigma, space).float().to(device),
            noise_space=space == "noise",
            source=self._sources(records),
        )
        return Replay.of({**found, MATCHING.name: matching})

    def _sources(self, records: Sequence[ImageRecord]) -> Tensor | None:
        """[rollout, 1, ...] the latents of the images that were edited; None where there is none."""
        denoiser = self.denoiser
        told = denoiser.network.conditions.of([record.asked for record in records], denoiser.shape)
        if any("source" not in condition for condition in told):
            return None
        return torch.stack([condition["source"] for condition in told]).float().to(denoiser.device)[:, None]

    def _weight(self, likelihood: ImageMatching, uniform: Tensor, sigma: Tensor) -> Tensor:
        """w(s), like sigma. The ELBO of a flow integrates (1 - s) / s |v - target|^2 over s; levels are drawn with the
        density du / ds, which the derivative of `levels` undoes."""
        s, family = sigma.float(), self.denoiser.family
        if likelihood.weight == "elbo":
            e = 1e-3
            slope = (family.levels(uniform + e)[0] - family.levels(uniform - e)[0]) / (2 * e)
            return (1 - s) / s * slope.float()
        return {"one": torch.ones_like(s), "sigma": s, "sigma_squared": s.square()}[likelihood.weight]

    def _uniform(self, seed: int) -> Tensor:
        """Stratified uniform draws [draw] inside draw_range, from a rollout's seed alone."""
        low, high = self.likelihood.draw_range
        return low + (high - low) * score.stratified(seed, self.likelihood.draws, 1)

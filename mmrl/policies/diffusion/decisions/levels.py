"""Decisions that are noise levels: at each, the network's prediction for the noised image is compared with its
target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

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
    """Samples images by deterministic chains, and scores them by the network's errors at random noise levels."""

    def __init__(self, denoiser: Denoiser, likelihood: ImageMatching | ImageContrast) -> None:
        """likelihood: its `draws` is the number of decisions of a rollout."""
        self.denoiser, self.likelihood, self.count = denoiser, likelihood, likelihood.draws

    def rollout(self, prompts: Sequence[Prompt], group_size: int, seeds: Sequence[int], step: int) -> Rollouts:
        """Samples `group_size` rollouts per prompt. step: not used."""
        denoiser, row_prompts = self.denoiser, [p for p in prompts for _ in range(group_size)]
        # no step is stochastic, so all windows are empty
        inputs, windows = (
            [ConditionInputs.from_prompt(p) for p in row_prompts],
            list[list[int]]([[]] * len(row_prompts)),
        )
        chain = denoiser.sample(denoiser.sampler, inputs, seeds, windows, denoiser.denoising.guidance)
        return self._rollouts(row_prompts, inputs, group_size, seeds, chain)

    def demonstrate(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], prompt_dropout: float, negative_prompt: str
    ) -> Rollouts:
        """Builds rollouts of the images in metadata["target"] of prompts; see `DiffusionPolicy.demonstrate`. seeds: one
        per prompt. prompt_dropout: the probability that the text of a prompt is replaced by `negative_prompt`. Raises
        UserError for a prompt without a target."""
        missing = next((p.id for p in prompts if "target" not in p.metadata), None)
        if missing is not None:
            raise UserError(
                f"prompt {missing} has no image to learn from, which algorithm.type=supervised needs; set its "
                "metadata['target']"
            )
        targets = torch.stack([p.metadata["target"] for p in prompts])
        data = self.denoiser.family.to_latents(targets.to(self.denoiser.device))
        empty = data.new_zeros(len(data), 0, *data.shape[1:])  # a chain of 0 steps
        inputs = [ConditionInputs.from_prompt(p) for p in prompts]
        rollouts = self._rollouts(prompts, inputs, 1, seeds, Chain(data, empty, empty), decode=False)
        for i, record in enumerate(rollouts.inputs):
            uniform = score.stratified(record.seed, 1)[0]
            if uniform < prompt_dropout:
                rollouts.inputs[i] = replace(
                    record, condition_inputs=record.condition_inputs.with_text(negative_prompt)
                )
        return rollouts

    def _rollouts(
        self,
        prompts: Sequence[Prompt],
        inputs: Sequence[ConditionInputs],
        group_size: int,
        seeds: Sequence[int],
        chain: Chain,
        *,
        decode: bool = True,
    ) -> Rollouts:
        """Builds rollouts of finished chains, with the seeds of their noise levels: one per group if
        `likelihood.shared`, else one per rollout."""
        # `shared` is None if neither the user nor the algorithm has set it, which means False
        shared = isinstance(self.likelihood, ImageMatching) and self.likelihood.shared is True
        # i - i % group_size: the first rollout of the group
        level_seeds = [seeds[i - i % group_size] if shared else seed for i, seed in enumerate(seeds)]
        windows: list[list[int]] = [[]] * len(prompts)
        return self.denoiser.rollouts(
            prompts, inputs, group_size, level_seeds, chain, windows, self.count, decode=decode
        )

    def recorded_replay(self, rollouts: Rollouts) -> None:
        """Returns None: sampling makes no predictions at the noise levels of decisions."""

    def replay(self, rollouts: Rollouts, model: NetworkCall) -> Replay:
        """Returns negative matching errors under `model` as log-likelihoods, and predictions and data as
        `MatchingTargets`, from one forward pass of rollout x noise level rows."""
        records: list[ImageRecord] = rollouts.inputs
        denoiser, likelihood = self.denoiser, self.likelihood
        space, device = denoiser.family.space, denoiser.device
        data = torch.stack([r.data for r in records])[:, None].to(device)
        noise = score.draw_noises([r.seed for r in records], likelihood.draws, data.shape[2:]).to(device)
        uniform = torch.stack([self._uniform(r.seed) for r in records])
        sigma, time = (part.view(uniform.shape) for part in denoiser.family.levels(uniform.flatten()))
        x, target = score.noisy_samples(data, noise, sigma, space)
        inputs = [r.condition_inputs for r in records for _ in range(likelihood.draws)]
        guidance = 1.0 if isinstance(likelihood, ImageMatching) else denoiser.denoising.guidance
        rows, levels, times = x.flatten(0, 1), sigma.flatten(), time.flatten()

        def predict(part: slice) -> Tensor:
            """Predicts the velocity or noise of some of the rows."""
            return denoiser.network.predict(model, rows[part], levels[part], times[part], inputs[part], guidance)

        v = denoiser.in_parts(predict, len(rows)).float().view_as(x)
        weight = None
        if isinstance(likelihood, ImageMatching):
            weight = self._weight(likelihood, uniform, sigma).to(device)
        old, ref = rollouts.old_prediction, rollouts.ref_prediction
        columns = score.matching_likelihood(
            v, target, weight, old=old, reference=ref, reduction=likelihood.reduction
        ).columns
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
        return Replay.from_columns({**columns, MATCHING.name: matching})

    def _sources(self, records: Sequence[ImageRecord]) -> Tensor | None:
        """Returns the latents of the images that are edited, [rollout, 1, ...]; None if a rollout has none."""
        denoiser = self.denoiser
        conditions = denoiser.network.conditions.encode([record.condition_inputs for record in records], denoiser.shape)
        if any("source" not in condition for condition in conditions):
            return None
        return torch.stack([condition["source"] for condition in conditions]).float().to(denoiser.device)[:, None]

    def _weight(self, likelihood: ImageMatching, uniform: Tensor, sigma: Tensor) -> Tensor:
        """Returns the weight w(sigma) of each matching error, shaped like sigma.

        The ELBO of a flow is the integral of (1 - s) / s |v - target|^2 over s. Levels are s = f(u) for uniform u, with
        density du / ds; the factor ds / du, computed numerically, corrects for it.
        """
        s, family = sigma.float(), self.denoiser.family
        if likelihood.weight == "elbo":
            h = 1e-3
            slope = (family.levels(uniform + h)[0] - family.levels(uniform - h)[0]) / (2 * h)
            return (1 - s) / s * slope.float()
        return {"one": torch.ones_like(s), "sigma": s, "sigma_squared": s.square()}[likelihood.weight]

    def _uniform(self, seed: int) -> Tensor:
        """Returns stratified uniform numbers inside `draw_range`, [noise level], from the seed of a rollout."""
        low, high = self.likelihood.draw_range
        numbers = score.stratified(seed, self.likelihood.draws, number=1)  # `demonstrate` uses those of number 0
        return low + (high - low) * numbers

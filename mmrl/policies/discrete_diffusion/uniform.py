"""Uniform discrete diffusion: a response begins as random tokens, and step by step more of them are replaced by the
model's predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from mmrl.generation.sampling import draw
from mmrl.policies.discrete_diffusion.likelihoods import States
from mmrl.policies.discrete_diffusion.policy import DiscreteDiffusionPolicy, TokenDiffusionOptions
from mmrl.policies.discrete_diffusion.responses import MaskedRecord, ResponseLayout
from mmrl.policies.discrete_diffusion.scorer import MaskScorer
from mmrl.policies.discrete_diffusion.uniform_settings import Noising, NoisingRollouts
from mmrl.policies.vlm.scorer import transformers_model
from mmrl.rollouts import Rollouts
from mmrl.samplers.chain import derive_seed

REPLAY_SEED_OFFSET = 1 << 40  # added to a rollout's seed: it is replayed under other noise than it was sampled from


class UniformPolicy(DiscreteDiffusionPolicy):
    """Decides the tokens of the finished response, which are scored in states that are noised from it anew; the states
    of sampling do not matter."""

    kind: ClassVar[str] = "uniform_diffusion"

    def __init__(
        self, scorer: MaskScorer, layout: ResponseLayout, options: TokenDiffusionOptions, noising: Noising
    ) -> None:
        super().__init__(scorer, layout, options)
        self.noising = noising
        size = transformers_model(scorer.model).get_output_embeddings().weight.shape[0]
        allowed = torch.ones(size, dtype=torch.bool)
        allowed[layout.vocabulary.suppressed] = False
        self.allowed = allowed.nonzero().flatten()  # [n] tokens that noise and samples consist of

    def _draw(self, prompts: list[Tensor], seeds: Sequence[int], temperature: float) -> list[MaskedRecord]:
        """Samples with steps of equal size in the chance t that a token is noise: of the tokens not yet kept at t, the
        share that is kept at s < t, (t - s) / t, is replaced by the model's predictions; the last step leaves none."""
        generators = [torch.Generator(self.device).manual_seed(int(seed)) for seed in seeds]
        response = self._tokens(self._uniform(generators))
        rows = torch.arange(len(prompts)).repeat_interleave(self.layout.length).to(self.device)
        position = torch.arange(self.layout.length).repeat(len(prompts)).to(self.device)
        first = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        for turn in range(self.noising.steps):
            ids, mask = self.collator.collate([torch.cat(pair) for pair in zip(prompts, response, strict=True)])
            logits = self.module.logits(ids, mask, rows, first[rows] + position)
            logits = logits.view(len(prompts), self.layout.length, -1) / (temperature or 1.0)
            tokens = (draw(logits, generators) if temperature else logits).argmax(-1).cpu()
            now = self._uniform(generators) < 1 / (self.noising.steps - turn)
            response = torch.where(now, tokens, response)
        replay_temperature = temperature or 1.0  # responses of the most likely tokens are replayed as they are
        steps = torch.zeros(self.layout.length, dtype=torch.long)
        return [
            MaskedRecord(prompt, response[i], steps, int(seeds[i]), replay_temperature)
            for i, prompt in enumerate(prompts)
        ]

    def _forwards(self, record: MaskedRecord) -> int:
        return self.noising.steps

    def _uniform(self, generators: Sequence[torch.Generator]) -> Tensor:
        """Draws numbers in [0, 1), [row, position], on the CPU."""
        drawn = [torch.rand(self.layout.length, generator=generator, device=self.device) for generator in generators]
        return torch.stack(drawn).cpu()

    def _tokens(self, uniform: Tensor) -> Tensor:
        """Maps numbers in [0, 1) to allowed tokens."""
        return self.allowed[(uniform * len(self.allowed)).long().clamp(max=len(self.allowed) - 1)]

    def states_of(self, record: MaskedRecord) -> States:
        return noised(record.seed, self.layout.length, self.noising.draws, self.noising.levels)

    def resample_states(self, rollouts: Rollouts, epoch: int, keep: Tensor) -> Rollouts | None:
        """Implements `ResamplingStates`, with `noising.redraw`: seeds depend on the rollout's and on the epoch."""
        if not (isinstance(self.noising, NoisingRollouts) and self.noising.redraw):
            return None
        inputs = [
            record if stays else replace(record, seed=derive_seed(record.seed, epoch))
            for record, stays in zip(rollouts.inputs, keep.tolist(), strict=True)
        ]
        return replace(rollouts, inputs=inputs)

    def _response_in_state(self, record: MaskedRecord, states: States, state: int) -> Tensor:
        assert states.noise is not None
        return torch.where(states.empty[state], self._tokens(states.noise[state]), record.response)


def noised(seed: int, length: int, draws: int, levels: tuple[float, float]) -> States:
    """Noises every position in draw j of n with a chance from the j-th of n equal parts of `levels`. All positions are
    scored, for the model can not tell which are noise."""
    generator, (low, high) = torch.Generator().manual_seed(seed + REPLAY_SEED_OFFSET), levels
    level = low + (high - low) * (torch.arange(draws) + torch.rand(draws, generator=generator)) / draws
    empty = torch.rand(draws, length, generator=generator) < level[:, None]
    noise = torch.rand(draws, length, generator=generator)
    return States(empty, torch.full((draws, length), 1 / draws), noise=noise)

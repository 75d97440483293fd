"""Uniform discrete diffusion: a response starts as random tokens, and each step replaces some by the model's
predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from mmrl.generation.sampling import add_gumbel_noise
from mmrl.policies.discrete_diffusion.likelihoods import States
from mmrl.policies.discrete_diffusion.policy import DiscreteDiffusionPolicy, TokenDiffusionOptions
from mmrl.policies.discrete_diffusion.responses import MaskedRecord, ResponseLayout
from mmrl.policies.discrete_diffusion.scorer import MaskScorer
from mmrl.policies.discrete_diffusion.uniform_settings import Noising, NoisingRollouts
from mmrl.policies.vlm.scorer import transformers_model
from mmrl.rollouts import Rollouts
from mmrl.samplers.chain import derive_seed

REPLAY = 9101  # mixed into the seed of a rollout, so that its replay gets other noise than its sampling


class UniformPolicy(DiscreteDiffusionPolicy):
    """A uniform diffusion model. Its decisions are the tokens of the finished response. They are scored in states that
    are made by noising the response, not in the states of sampling."""

    kind: ClassVar[str] = "uniform_diffusion"

    def __init__(
        self, scorer: MaskScorer, layout: ResponseLayout, options: TokenDiffusionOptions, noising: Noising
    ) -> None:
        """noising: steps of sampling, and the states of scoring."""
        super().__init__(scorer, layout, options)
        self.noising = noising
        vocabulary_size = transformers_model(scorer.model).get_output_embeddings().weight.shape[0]
        allowed = torch.ones(vocabulary_size, dtype=torch.bool)
        allowed[layout.vocabulary.suppressed] = False
        self.allowed = allowed.nonzero().flatten()  # [n] ids of the tokens that noise and responses consist of

    def _sample(self, prompts: list[Tensor], seeds: Sequence[int], temperature: float) -> list[MaskedRecord]:
        """Samples responses; see `DiscreteDiffusionPolicy._sample`.

        The noise level t, the probability that a token is noise, falls from 1 to 0 in equal steps. A step from t to s
        replaces each token by the model's prediction with probability (t - s) / t; the last step replaces all.
        """
        generators = [torch.Generator(self.device).manual_seed(int(seed)) for seed in seeds]
        response = self._random_tokens(self._uniform(generators))
        rows = torch.arange(len(prompts)).repeat_interleave(self.layout.length).to(self.device)
        position = torch.arange(self.layout.length).repeat(len(prompts)).to(self.device)
        prompt_lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        for step in range(self.noising.steps):
            ids, mask = self.collator.collate([torch.cat(pair) for pair in zip(prompts, response, strict=True)])
            logits = self.module.logits(ids, mask, rows, prompt_lengths[rows] + position)
            logits = logits.view(len(prompts), self.layout.length, -1) / (temperature or 1.0)
            tokens = (add_gumbel_noise(logits, generators) if temperature else logits).argmax(-1).cpu()
            # (t - s) / t for equal steps; 1 in the last one
            replace_mask = self._uniform(generators) < 1 / (self.noising.steps - step)
            response = torch.where(replace_mask, tokens, response)
        logp_temperature = temperature or 1.0  # log-probabilities of greedy responses (temperature 0) are those at 1
        # No step fills a position for good, so none is recorded
        steps = torch.zeros(self.layout.length, dtype=torch.long)
        return [
            MaskedRecord(prompt, response[i], steps, int(seeds[i]), logp_temperature)
            for i, prompt in enumerate(prompts)
        ]

    def _forwards(self, record: MaskedRecord) -> int:
        return self.noising.steps

    def _uniform(self, generators: Sequence[torch.Generator]) -> Tensor:
        """Samples uniform numbers in [0, 1), [row, position], on the CPU."""
        rows = [torch.rand(self.layout.length, generator=generator, device=self.device) for generator in generators]
        return torch.stack(rows).cpu()

    def _random_tokens(self, uniform: Tensor) -> Tensor:
        """Maps uniform numbers in [0, 1) to ids of allowed tokens, of the same shape."""
        return self.allowed[(uniform * len(self.allowed)).long().clamp(max=len(self.allowed) - 1)]

    def scoring_states(self, record: MaskedRecord) -> States:
        return noised(record.seed, self.layout.length, self.noising.draws, self.noising.levels)

    def resample_states(self, rollouts: Rollouts, epoch: int, keep: Tensor) -> Rollouts | None:
        """Returns the rollouts with new seeds, so that epoch `epoch` of the updates scores them in new states; None if
        `noising.redraw` is false. keep: [rollout] bool, rollouts that keep their seed."""
        if not (isinstance(self.noising, NoisingRollouts) and self.noising.redraw):
            return None
        inputs = [
            record if keep_states else replace(record, seed=derive_seed(record.seed, epoch))
            for record, keep_states in zip(rollouts.inputs, keep.tolist(), strict=True)
        ]
        return replace(rollouts, inputs=inputs)

    def _noised_response(self, record: MaskedRecord, states: States, state: int) -> Tensor:
        assert states.noise is not None
        return torch.where(states.masked[state], self._random_tokens(states.noise[state]), record.response)


def noised(seed: int, length: int, num_states: int, levels: tuple[float, float]) -> States:
    """Returns states in which random tokens replace some positions: in state j of n each position is replaced with a
    probability t, where t is uniform in the j-th of n equal parts of `levels`.

    All positions are scored in every state, also those that are not replaced: the model is not told which are.
    """
    # not an offset of 32 bits or more: torch's generator of the CPU reads the lower 32 bits of a seed
    generator, (low, high) = torch.Generator().manual_seed(derive_seed(seed, REPLAY)), levels
    part = torch.arange(num_states) + torch.rand(num_states, generator=generator)
    level = low + (high - low) * part / num_states
    masked = torch.rand(num_states, length, generator=generator) < level[:, None]
    noise = torch.rand(num_states, length, generator=generator)
    return States(masked, torch.full((num_states, length), 1 / num_states), noise=noise)

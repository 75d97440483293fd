"""Samples images token by token, after a text if the model reasons first."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache

from mmrl.generation.sampling import add_gumbel_noise
from mmrl.policies.autoregressive_image.prompts import NO_TEXT, ImageTokenPrompts, ImageTokenRecord
from mmrl.policies.vlm.scorer import without_checkpointing
from mmrl.rollouts import Prompt
from mmrl.samplers.chain import derive_seed

TEXT_SEED = 9001  # mixed into the seed of a rollout for its text; the seed itself is for the image


class ImageTokenSampler:
    """Samples text and image tokens. With `lockstep`, all ranks make the same number of forward passes."""

    def __init__(self, prompts: ImageTokenPrompts) -> None:
        self.prompts, self.module, self.writer = prompts, prompts.scorer, prompts.writer
        self.lockstep = False

    @torch.no_grad()
    def sample(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], temperature: float, guidance: float
    ) -> list[ImageTokenRecord]:
        """Samples one image per prompt; image i depends on seeds[i] alone. temperature: 0 takes the most likely tokens.
        guidance: classifier-free guidance scale; 1: none."""
        with without_checkpointing(self.module):
            return self._sample(prompts, seeds, temperature, guidance)

    def _sample(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], temperature: float, guidance: float
    ) -> list[ImageTokenRecord]:
        """Samples as `sample` does; the caller has switched gradient checkpointing off. Images of temperature 0 are
        recorded with temperature 1, at which replay then computes their log-probabilities."""
        prompt_ids = [self.prompts.encode_prompt(prompt) for prompt in prompts]
        texts = (
            self._sample_texts(prompt_ids, seeds, temperature)
            if self.prompts.reasoning_length
            else [NO_TEXT] * len(prompt_ids)
        )
        generators = [torch.Generator(self.prompts.device).manual_seed(int(seed)) for seed in seeds]
        ids, mask = self.prompts.collate(
            self.prompts.with_unconditional(self.prompts.prefixes(prompt_ids, texts), guidance)
        )
        cache, sampled = DynamicCache(), []
        for _ in range(self.writer.tokens_per_image):
            hidden = self.module.hidden(ids, mask, past_key_values=cache, use_cache=True)
            logits = self.module.logits(hidden[:, -1:], guidance)[:, 0] / (temperature or 1.0)
            image_token = (add_gumbel_noise(logits, generators) if temperature else logits).argmax(-1)
            token = self.writer.first + image_token  # the id in the vocabulary
            sampled.append(token.cpu())
            # with guidance the unconditional rows, the second half, get the same tokens
            ids = token[:, None] if guidance == 1 else token.repeat(2)[:, None]
            mask = torch.cat([mask, torch.ones_like(ids, dtype=torch.bool)], 1)
        tokens = torch.stack(sampled, 1)
        return [
            ImageTokenRecord(prompt, tokens[i], temperature or 1.0, texts[i]) for i, prompt in enumerate(prompt_ids)
        ]

    def _sample_texts(self, prompt_ids: list[Tensor], seeds: Sequence[int], temperature: float) -> list[Tensor]:
        """Samples the text before each image, [text token]: up to its end token, or to the maximum length.
        temperature: 0 takes the most likely tokens."""
        device = self.prompts.device
        generators = [torch.Generator(device).manual_seed(derive_seed(int(seed), TEXT_SEED) % 2**63) for seed in seeds]
        ids, mask = self.prompts.collate(prompt_ids)
        cache, end = DynamicCache(), torch.tensor(self.prompts.tokenizer.eos_token_id)
        sampled = torch.zeros(len(prompt_ids), 0, dtype=torch.long)
        for _ in range(self.prompts.reasoning_length):
            hidden = self.module.hidden(ids, mask, past_key_values=cache, use_cache=True)
            logits = self.module.text_logits(hidden[:, -1]) / (temperature or 1.0)
            token = (add_gumbel_noise(logits, generators) if temperature else logits).argmax(-1)
            sampled = torch.cat([sampled, token.cpu()[:, None]], 1)
            # in lockstep all ranks go on to the maximum length, and what follows the end token is cut off below
            if not self.lockstep and bool((sampled == end).any(1).all()):
                break
            ids = token[:, None]
            mask = torch.cat([mask, torch.ones_like(ids, dtype=torch.bool)], 1)
        is_end = (sampled == end).long()
        up_to_end = is_end.cumsum(1) - is_end == 0  # no end token before this token
        return [row[mask] for row, mask in zip(sampled, up_to_end, strict=True)]

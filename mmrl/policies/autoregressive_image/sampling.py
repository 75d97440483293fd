"""Samples images token by token, behind a text that the model writes before."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache

from mmrl.generation.sampling import draw
from mmrl.policies.autoregressive_image.prompts import NO_TEXT, ImageTokenPrompts, ImageTokenRecord
from mmrl.policies.vlm.scorer import recompute
from mmrl.rollouts import Prompt
from mmrl.samplers.chain import derive_seed

TEXTS = 9001  # mixed into the seeds that text is drawn with


class ImageTokenSampler:
    """Samples text and image tokens. in_step: every rank makes as many passes as the others."""

    def __init__(self, prompts: ImageTokenPrompts) -> None:
        self.prompts, self.module, self.writer = prompts, prompts.scorer, prompts.writer
        self.in_step = False

    @torch.no_grad()
    def draw(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], temperature: float, guidance: float
    ) -> list[ImageTokenRecord]:
        """Samples one image a prompt, from its seed alone. temperature: 0 for the most likely token each time."""
        recompute(self.module, False)
        prompt_ids = [self.prompts.read(prompt) for prompt in prompts]
        texts = (
            self._write(prompt_ids, seeds, temperature)
            if self.prompts.reasoning_length
            else [NO_TEXT] * len(prompt_ids)
        )
        generators = [torch.Generator(self.prompts.device).manual_seed(int(seed)) for seed in seeds]
        ids, mask = self.prompts.collate(
            self.prompts.with_unconditional(self.prompts.prefixes(prompt_ids, texts), guidance)
        )
        cache, written = DynamicCache(), []
        for _ in range(self.writer.tokens_per_image):
            hidden = self.module.hidden(ids, mask, past_key_values=cache, use_cache=True)
            logits = self.module.logits(hidden[:, -1:], guidance)[:, 0] / (temperature or 1.0)
            token = (draw(logits, generators) if temperature else logits).argmax(-1) + self.writer.first
            written.append(token.cpu())
            ids = token[:, None] if guidance == 1 else token.repeat(2)[:, None]
            mask = torch.cat([mask, torch.ones_like(ids, dtype=torch.bool)], 1)
        tokens = torch.stack(written, 1)
        recompute(self.module, True)
        return [
            ImageTokenRecord(prompt, tokens[i], temperature or 1.0, texts[i]) for i, prompt in enumerate(prompt_ids)
        ]

    def _write(self, prompt_ids: list[Tensor], seeds: Sequence[int], temperature: float) -> list[Tensor]:
        """Samples the text before each image, [text token]: up to its end token, or as long as it may be."""
        generators = [
            torch.Generator(self.prompts.device).manual_seed(derive_seed(int(seed), TEXTS) % 2**63) for seed in seeds
        ]
        ids, mask = self.prompts.collate(prompt_ids)
        cache, end = DynamicCache(), torch.tensor(self.prompts.tokenizer.eos_token_id)
        written = torch.zeros(len(prompt_ids), 0, dtype=torch.long)
        for _ in range(self.prompts.reasoning_length):
            hidden = self.module.hidden(ids, mask, past_key_values=cache, use_cache=True)
            logits = self.module.text_logits(hidden[:, -1]) / (temperature or 1.0)
            token = (draw(logits, generators) if temperature else logits).argmax(-1)
            written = torch.cat([written, token.cpu()[:, None]], 1)
            if not self.in_step and bool((written == end).any(1).all()):
                break
            ids = token[:, None]
            mask = torch.cat([mask, torch.ones_like(ids, dtype=torch.bool)], 1)
        ended = (written == end).long()
        return [row[keep] for row, keep in zip(written, ended.cumsum(1) - ended == 0, strict=True)]

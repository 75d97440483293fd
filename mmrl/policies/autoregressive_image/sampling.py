"""Images that a language model writes code by code, behind a text that it writes before."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache

from mmrl.generation.sampling import draw
from mmrl.policies.autoregressive_image.prompts import NOTHING, CodePrompts, CodeRecord
from mmrl.policies.vlm.scorer import recompute
from mmrl.rollouts import Prompt
from mmrl.samplers.chain import mixed

TEXTS = 9001  # of the noises that text is drawn with


class CodeSampler:
    """Draws text and codes. in_step: with other ranks, which make as many passes."""

    def __init__(self, prompts: CodePrompts) -> None:
        self.prompts, self.module, self.writer = prompts, prompts.scorer, prompts.writer
        self.in_step = False

    @torch.no_grad()
    def draw(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], temperature: float, guidance: float
    ) -> list[CodeRecord]:
        """One image a prompt, from its seed alone. temperature: 0 for the most likely token each time."""
        recompute(self.module, False)
        told = [self.prompts.read(prompt) for prompt in prompts]
        texts = self._write(told, seeds, temperature) if self.prompts.reasoning_length else [NOTHING] * len(told)
        generators = [torch.Generator(self.prompts.device).manual_seed(int(seed)) for seed in seeds]
        ids, there = self.prompts.collate(self.prompts.guided(self.prompts.before(told, texts), guidance))
        cache, written = DynamicCache(), []
        for _ in range(self.writer.places):
            hidden = self.module.hidden(ids, there, past_key_values=cache, use_cache=True)
            logits = self.module.logits(hidden[:, -1:], guidance)[:, 0] / (temperature or 1.0)
            code = (draw(logits, generators) if temperature else logits).argmax(-1) + self.writer.first
            written.append(code.cpu())
            ids = code[:, None] if guidance == 1 else code.repeat(2)[:, None]
            there = torch.cat([there, torch.ones_like(ids, dtype=torch.bool)], 1)
        tokens = torch.stack(written, 1)
        recompute(self.module, True)
        return [CodeRecord(prompt, tokens[i], temperature or 1.0, texts[i]) for i, prompt in enumerate(told)]

    def _write(self, told: list[Tensor], seeds: Sequence[int], temperature: float) -> list[Tensor]:
        """The text before codes, [word] each: up to its end token, or as long as it may be."""
        generators = [
            torch.Generator(self.prompts.device).manual_seed(mixed(int(seed), TEXTS) % 2**63) for seed in seeds
        ]
        ids, there = self.prompts.collate(told)
        cache, end = DynamicCache(), torch.tensor(self.prompts.tokenizer.eos_token_id)
        written = torch.zeros(len(told), 0, dtype=torch.long)
        for _ in range(self.prompts.reasoning_length):
            hidden = self.module.hidden(ids, there, past_key_values=cache, use_cache=True)
            logits = self.module.words(hidden[:, -1]) / (temperature or 1.0)
            word = (draw(logits, generators) if temperature else logits).argmax(-1)
            written = torch.cat([written, word.cpu()[:, None]], 1)
            if not self.in_step and bool((written == end).any(1).all()):
                break
            ids = word[:, None]
            there = torch.cat([there, torch.ones_like(ids, dtype=torch.bool)], 1)
        ended = (written == end).long()
        return [row[kept] for row, kept in zip(written, ended.cumsum(1) - ended == 0, strict=True)]

"""Likelihoods of image tokens, and of the text before them, under a language model."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor, nn

from mmrl.kernels import token_logprob
from mmrl.policies.autoregressive_image.writers import CacheOptions, ImageTokenWriter


class ImageTokenScorer(nn.Module):
    """Computes likelihoods of image tokens and of the text before them; this is the module that the engine wraps."""

    allowed: Tensor

    def __init__(self, model: nn.Module, writer: ImageTokenWriter, allowed: Tensor) -> None:
        """allowed: [text token] bool, the tokens that text may hold; an image holds image tokens alone."""
        super().__init__()
        self.model, self.writer = model, writer
        self.register_buffer("allowed", allowed, persistent=False)

    def hidden(self, ids: Tensor, mask: Tensor, **options: Unpack[CacheOptions]) -> Tensor:
        """Returns hidden states. ids: [row, token]; mask: [row, token], padded in front, which may begin before
        `ids`."""
        position_ids = positions(mask)[:, -ids.shape[1] :]
        return self.writer.hidden(self.model, ids, mask.long(), position_ids=position_ids, **options)

    def logits(self, hidden: Tensor, guidance: float) -> Tensor:
        """Returns fp32 logits of image tokens, [row, position, image token]. With guidance the second half of the rows
        is unconditional, and u + guidance (c - u) is left."""
        logits = self.writer.image_logits(self.model, hidden).float()
        if guidance == 1:
            return logits
        conditional, unconditional = logits.chunk(2)
        return unconditional + guidance * (conditional - unconditional)

    def text_logits(self, hidden: Tensor) -> Tensor:
        """Returns fp32 logits of text, [..., text token]."""
        return self.writer.text_logits(self.model, hidden).float().masked_fill(~self.allowed, -torch.inf)

    def forward(
        self,
        ids: Tensor,
        mask: Tensor,
        tokens: Tensor,
        temperature: Tensor,
        guidance: float,
        text: Tensor,
        text_columns: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns logp, entropy and sum of squared probabilities, [row, text token + position] fp32, of `text` [row,
        text token] and `tokens` [row, position].

        ids, mask: [row, token], padded in front, without the last image token; twice as many rows with guidance, which
        applies to image tokens alone. temperature: [row]. text_columns: [row, text token], the columns of `ids` whose
        hidden states predict the text.
        """
        hidden = self.hidden(ids, mask, use_cache=False)
        scale = temperature[:, None, None]
        pairs = [(self.logits(hidden[:, -tokens.shape[1] :], guidance) / scale, tokens - self.writer.first)]
        if text.shape[1]:
            rows = torch.arange(len(text), device=text.device)[:, None]
            pairs.insert(0, (self.text_logits(hidden[rows, text_columns]) / scale, text))
        parts = []
        for logits, targets in pairs:
            scores = token_logprob(logits.flatten(0, 1), targets.flatten())
            parts.append([part.view(targets.shape) for part in (scores.logp, scores.entropy, scores.square_sum)])
        logp, entropy, square_sum = (torch.cat(part, 1) for part in zip(*parts, strict=True))
        return logp, entropy, square_sum


def positions(mask: Tensor) -> Tensor:
    """Returns the position of each token behind the padding, [row, token]."""
    return (mask.long().cumsum(1) - 1).clamp(min=0)

"""The module that DeepSpeed wraps: log-probabilities of image tokens and of the text before them."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor, nn

from mmrl.kernels import token_logprob
from mmrl.policies.autoregressive_image.writers import CacheOptions, ImageTokenWriter


class ImageTokenScorer(nn.Module):
    """Computes log-probabilities of image tokens and of the text before them; the module that DeepSpeed wraps."""

    allowed: Tensor

    def __init__(self, model: nn.Module, writer: ImageTokenWriter, allowed: Tensor) -> None:
        """allowed: [token below the first image token] bool, the tokens that may be sampled in a text."""
        super().__init__()
        self.model, self.writer = model, writer
        self.register_buffer("allowed", allowed, persistent=False)

    def hidden(self, ids: Tensor, mask: Tensor, **options: Unpack[CacheOptions]) -> Tensor:
        """Returns hidden states of `ids` [row, token]; see `ImageTokenWriter.hidden`. mask: attention mask, [row,
        token], padded on the left; with a key-value cache it covers the cached tokens too."""
        position_ids = positions(mask)[:, -ids.shape[1] :]
        return self.writer.hidden(self.model, ids, mask.long(), position_ids=position_ids, **options)

    def logits(self, hidden: Tensor, guidance: float) -> Tensor:
        """Returns fp32 logits of image tokens, [row, position, image token]. With guidance, the second half of the rows
        is unconditional (u), and the result for the first half (c) is u + guidance (c - u)."""
        logits = self.writer.image_logits(self.model, hidden).float()
        if guidance == 1:
            return logits
        conditional, unconditional = logits.chunk(2)
        return unconditional + guidance * (conditional - unconditional)

    def text_logits(self, hidden: Tensor) -> Tensor:
        """Returns fp32 logits of text tokens, [..., text token]; -inf for those that are not allowed."""
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
        """Returns logp, entropy and sum of squared probabilities of the tokens of `text` [row, text token], then of the
        image tokens `tokens` [row, image token]: [row, text token + image token] fp32 each.

        ids, mask: [row, token], padded on the left, without the last image token. With guidance, which applies to image
        tokens alone, they have twice as many rows, the second half unconditional. temperature: [row]. text_columns:
        [row, text token], the columns of `ids` whose hidden states predict the text.
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
    """Returns the position ids of tokens that are padded on the left, [row, token]. mask: attention mask, [row,
    token]."""
    return (mask.long().cumsum(1) - 1).clamp(min=0)

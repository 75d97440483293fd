"""What a language model says of codes and of the text before them."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor, nn

from mmrl.kernels import token_logprob
from mmrl.policies.autoregressive_image.writers import CacheOptions, ImageTokenWriter


class CodeScorer(nn.Module):
    """What a model says of codes and of the text before them; this is the module that the engine wraps."""

    allowed: Tensor

    def __init__(self, model: nn.Module, writer: ImageTokenWriter, allowed: Tensor) -> None:
        """allowed: [word] bool, the tokens that text may hold; codes alone are written in an image."""
        super().__init__()
        self.model, self.writer = model, writer
        self.register_buffer("allowed", allowed, persistent=False)

    def hidden(self, ids: Tensor, there: Tensor, **options: Unpack[CacheOptions]) -> Tensor:
        """ids: [row, token]; there: [row, token], padded in front, which may begin before `ids`."""
        place = positions(there)[:, -ids.shape[1] :]
        return self.writer.hidden(self.model, ids, there.long(), position_ids=place, **options)

    def logits(self, hidden: Tensor, guidance: float) -> Tensor:
        """[row, place, code] fp32 of codes. With guidance the second half of the rows is unconditional, and
        u + guidance (c - u) is left."""
        found = self.writer.codes(self.model, hidden).float()
        if guidance == 1:
            return found
        told, untold = found.chunk(2)
        return untold + guidance * (told - untold)

    def words(self, hidden: Tensor) -> Tensor:
        """[..., word] fp32 of text."""
        return self.writer.words(self.model, hidden).float().masked_fill(~self.allowed, -torch.inf)

    def forward(
        self,
        ids: Tensor,
        there: Tensor,
        tokens: Tensor,
        temperature: Tensor,
        guidance: float,
        text: Tensor,
        before: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """logp, entropy and sum of squared probabilities, [row, word + place] fp32, of `text` [row, word] and `tokens`
        [row, place].

        ids, there: [row, token], padded in front, without the last code; twice as many rows with guidance, which codes
        alone have. temperature: [row]. before: [row, word], the place in `ids` behind which each word of text stands.
        """
        hidden = self.hidden(ids, there, use_cache=False)
        heat = temperature[:, None, None]
        asked = [(self.logits(hidden[:, -tokens.shape[1] :], guidance) / heat, tokens - self.writer.first)]
        if text.shape[1]:
            rows = torch.arange(len(text), device=text.device)[:, None]
            asked.insert(0, (self.words(hidden[rows, before]) / heat, text))
        parts = []
        for logits, said in asked:
            found = token_logprob(logits.flatten(0, 1), said.flatten())
            parts.append([part.view(said.shape) for part in (found.logp, found.entropy, found.square_sum)])
        logp, entropy, square_sum = (torch.cat(part, 1) for part in zip(*parts, strict=True))
        return logp, entropy, square_sum


def positions(there: Tensor) -> Tensor:
    """[row, token] the place of each token behind the padding."""
    return (there.long().cumsum(1) - 1).clamp(min=0)

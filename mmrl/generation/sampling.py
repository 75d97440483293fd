"""The sampling distribution of a token policy, shared by generation and replay so that the two can not differ."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """The distribution of the next token. `suppressed` holds the ids that may never be sampled (image placeholders)."""

    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    suppressed: tuple[int, ...] = ()
    vocabulary: int = 0  # ids are below this; 0: not known


def shape_logits(logits: Tensor, sampling: Sampling, *, keep: Tensor | None = None) -> Tensor:
    """logits: [row, vocabulary] -> fp32 logits of the distribution that is sampled from.

    `keep`: [row] token ids that stay possible whatever top_k and top_p say. Replay passes the sampled tokens, because
    after an update a token may fall out of the truncated set, where its log-probability would be -inf.
    """
    logits = logits.float()
    if sampling.suppressed:
        suppressed = torch.tensor(sampling.suppressed, device=logits.device)
        logits = logits.index_fill(-1, suppressed, -torch.inf)
    if sampling.temperature not in (0.0, 1.0):
        logits = logits / sampling.temperature
    if sampling.top_k > 0 or sampling.top_p < 1:
        out = _outside(logits.detach(), sampling.top_k, sampling.top_p)
        if keep is not None:
            out = out.scatter(-1, keep[:, None], False)
        logits = logits.masked_fill(out, -torch.inf)
    return logits


def _outside(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """[row, vocabulary] True where a token lies outside the top-k set, or outside the nucleus (arXiv 1904.09751) of
    what that leaves, renormalised. vLLM and transformers have this order; a tie with the last of the k stays inside."""
    ordered, order = logits.sort(dim=-1, descending=True)
    if 0 < top_k < logits.shape[-1]:
        ordered = ordered.masked_fill(ordered < ordered[:, top_k - 1 : top_k], -torch.inf)
    probability = ordered.softmax(-1)
    before = probability.cumsum(-1) - probability  # mass of the tokens that come first; the first is always inside
    out = (before >= top_p) if top_p < 1 else torch.zeros_like(before, dtype=torch.bool)
    out |= ordered == -torch.inf
    return torch.zeros_like(out).scatter(-1, order, out)


def draw(logits: Tensor, generators: list[torch.Generator]) -> Tensor:
    """Adds Gumbel noise from each row's own generator: the argmax of the result is a sample of softmax(logits).

    One generator a row makes a rollout depend on its own seed alone: not on its neighbours in the batch, not on the
    number of ranks, and not on what was drawn before a resume.
    """
    noise = torch.empty_like(logits)
    for row, generator in zip(noise, generators, strict=True):
        row.exponential_(generator=generator)
    # Some builds draw an exact 0, whose noise would be infinite: a sure token, or NaN where the logit is -inf.
    return logits - noise.clamp_min(torch.finfo(noise.dtype).eps / 2).log()

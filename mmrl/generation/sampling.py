"""The sampling distribution of a token policy, shared by generation and replay so that the two cannot differ."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """The distribution of the next token. suppressed: ids that are never sampled, such as image placeholders."""

    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    suppressed: tuple[int, ...] = ()
    vocabulary: int = 0  # ids are below this; 0: not known


def shape_logits(logits: Tensor, sampling: Sampling, *, keep: Tensor | None = None) -> Tensor:
    """Returns the fp32 logits of the distribution that is sampled from, after suppression, temperature, top_k and
    top_p.

    logits: [row, vocabulary]. keep: [row], a token id of each row that is not truncated. Replay passes the sampled
    tokens: after an update they may be outside of the truncated set, where their log-probability would be -inf.
    """
    logits = logits.float()
    if sampling.suppressed:
        suppressed = torch.tensor(sampling.suppressed, device=logits.device)
        logits = logits.index_fill(-1, suppressed, -torch.inf)
    if sampling.temperature not in (0.0, 1.0):
        logits = logits / sampling.temperature
    if sampling.top_k > 0 or sampling.top_p < 1:
        truncated = _truncated(logits.detach(), sampling.top_k, sampling.top_p)
        if keep is not None:
            truncated = truncated.scatter(-1, keep[:, None], False)
        logits = logits.masked_fill(truncated, -torch.inf)
    return logits


def _truncated(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Returns a mask [row, vocabulary] of the tokens outside the top-k set, or outside the nucleus (top-p, arXiv
    1904.09751) of the renormalised rest, in the order of vLLM and transformers. Ties with the k-th token are inside."""
    ordered, order = logits.sort(dim=-1, descending=True)
    if 0 < top_k < logits.shape[-1]:
        ordered = ordered.masked_fill(ordered < ordered[:, top_k - 1 : top_k], -torch.inf)
    probability = ordered.softmax(-1)
    before = probability.cumsum(-1) - probability  # mass of the tokens that come first; the first is always inside
    truncated = (before >= top_p) if top_p < 1 else torch.zeros_like(before, dtype=torch.bool)
    truncated |= ordered == -torch.inf
    return torch.zeros_like(truncated).scatter(-1, order, truncated)


def add_gumbel_noise(logits: Tensor, generators: list[torch.Generator]) -> Tensor:
    """Returns logits plus Gumbel noise, whose argmax is a sample of softmax(logits).

    logits: [row, vocabulary]. generators: one for each row, so that a rollout depends on its own seed only, and not on
    other rows of the batch, the number of ranks, or earlier samples.
    """
    noise = torch.empty_like(logits)
    for row, generator in zip(noise, generators, strict=True):
        row.exponential_(generator=generator)
    # Some builds of torch draw an exact 0, whose noise would be infinite: the token would always be sampled, or be NaN.
    return logits - noise.clamp_min(torch.finfo(noise.dtype).eps / 2).log()

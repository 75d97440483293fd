"""Drafts: unfinished responses, which are sampled in one or several calls of an engine (partial rollouts)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from mmrl.generation.vllm.engine import Request
from mmrl.policies.vlm.prompts import RolloutTokens
from mmrl.rollouts import Prompt


@dataclass(eq=False)
class Draft:
    """An unfinished response. The weights of the engine that samples its tokens may change before it is finished."""

    prompt: Prompt
    request: Request  # for the full response; its `limit` is the maximum number of response tokens
    tokens: RolloutTokens  # with the response so far
    logp: Tensor  # [response token] fp32, under the weights that sampled the token

    def finished(self, eos: tuple[int, ...]) -> bool:
        """Returns whether the response ends in one of the end tokens `eos` or has reached its limit."""
        response = self.tokens.response
        return len(response) > 0 and (len(response) == self.request.limit or int(response[-1]) in eos)

    def next_request(self, max_tokens: int) -> Request:
        """Returns the request for up to `max_tokens` more tokens."""
        request, length = self.request.after(self.tokens.response), len(self.tokens.response)
        seed = continued_seed(self.request.seed, length)
        return replace(request, seed=seed, limit=min(max_tokens, self.request.limit - length))

    def state(self) -> dict[str, Tensor | None]:
        """Returns the values to checkpoint. From them `Drafter.restore` rebuilds this draft, given a new draft of the
        same prompt and seed."""
        return {"response": self.tokens.response, "logp": self.logp, "experts": self.tokens.experts}

    def append(self, ids: Tensor, logp: Tensor, experts: Tensor | None) -> None:
        """Appends sampled tokens to the response.

        ids: [token] int64; logp: their log-probabilities, [token]; experts: [token, layer, k] int16, the experts of all
        tokens of prompt and response except the last one, None if routing is not recorded. Experts of earlier tokens
        that were recorded before are kept: like log-probabilities, they belong to the weights of that time.
        """
        old = self.tokens.experts
        if experts is not None and old is not None:
            experts = torch.cat([old, experts[len(old) :]])
        self.tokens = replace(self.tokens, response=torch.cat([self.tokens.response, ids]), experts=experts)
        self.logp = torch.cat([self.logp, logp])


def continued_seed(seed: int, tokens: int) -> int:
    """Returns the seed for continuing a response after its first `tokens` tokens. It differs from `seed`, which would
    repeat the random numbers of these tokens."""
    return seed if tokens == 0 else int(np.random.SeedSequence([seed, tokens]).generate_state(1)[0])

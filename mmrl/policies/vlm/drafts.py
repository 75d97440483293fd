"""Responses that an engine samples in one go or in several."""

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
    """An unfinished response of an engine, whose weights may change before it is finished."""

    prompt: Prompt
    request: Request  # for the whole response
    tokens: RolloutTokens  # with the response so far
    logp: Tensor  # [response token] fp32, each by the weights that drew it

    def finished(self, eos: tuple[int, ...]) -> bool:
        response = self.tokens.response
        return len(response) > 0 and (len(response) == self.request.limit or int(response[-1]) in eos)

    def next(self, count: int) -> Request:
        """Returns the request for up to `count` more tokens."""
        request, length = self.request.after(self.tokens.response), len(self.tokens.response)
        seed = continued_seed(self.request.seed, length)
        return replace(request, seed=seed, limit=min(count, self.request.limit - length))

    def state(self) -> dict[str, Tensor | None]:
        """Returns all that a new draft of the same prompt and seed lacks to be this one."""
        return {"response": self.tokens.response, "logp": self.logp, "experts": self.tokens.experts}

    def grow(self, ids: Tensor, logp: Tensor, experts: Tensor | None) -> None:
        """Appends sampled tokens. ids: [token] int64; logp: [token], their log-probabilities; experts: [token, layer,
        k] int16 of prompt and response but for the last token, None where routing is not recorded. Earlier records
        stay: a token keeps the experts with which the token after it was drawn, like that one's log-probability."""
        old = self.tokens.experts
        if experts is not None and old is not None:
            experts = torch.cat([old, experts[len(old) :]])
        self.tokens = replace(self.tokens, response=torch.cat([self.tokens.response, ids]), experts=experts)
        self.logp = torch.cat([self.logp, logp])


def continued_seed(seed: int, tokens: int) -> int:
    """Returns the seed of a response that is continued after so many tokens: the same seed would draw the same noise
    again."""
    return seed if tokens == 0 else int(np.random.SeedSequence([seed, tokens]).generate_state(1)[0])

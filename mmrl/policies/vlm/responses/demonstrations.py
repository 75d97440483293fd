"""Reference answers as responses, for supervised learning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mmrl.errors import UserError
from mmrl.policies.vlm.responses.tokens import ChatTokenizer
from mmrl.policies.vlm.turns import demonstrated
from mmrl.rollouts import Prompt, Rollouts


def demonstrate(tokens: ChatTokenizer, prompts: Sequence[Prompt], temperature: float) -> Rollouts:
    """Returns the prompts with their reference answers, one response each. temperature: at which they are replayed.
    Raises UserError for a demonstration of several responses."""
    answers = []
    for prompt in prompts:
        texts = demonstrated(prompt)
        if len(texts) != 1:
            raise UserError(
                f"the demonstration of prompt {prompt.id} has {len(texts)} responses; set task.environment, which "
                "answers them"
            )
        answers.append(demonstrated_ids(tokens, prompt, texts[0]))
    rows = [
        replace(row, response=answer, temperature=temperature)
        for row, answer in zip(tokens.encode(prompts), answers, strict=True)
    ]
    return tokens.rollouts(prompts, rows, 1)


def demonstrated_ids(tokens: ChatTokenizer, prompt: Prompt, text: str) -> Tensor:
    """Returns the tokens of a response that ends, [token]. Raises UserError for one that the policy could not give."""
    ids = tokens.ids(text) + [tokens.eos[0]]
    if len(ids) > tokens.max_response_length:
        raise UserError(
            f"the demonstration of prompt {prompt.id} has {len(ids)} tokens, more than "
            f"rollout.max_response_length={tokens.max_response_length}"
        )
    if impossible := set(ids) & set(tokens.suppressed):
        raise UserError(
            f"the demonstration of prompt {prompt.id} holds {tokens.tokenizer.decode(list(impossible))}, which "
            "the policy never samples"
        )
    return torch.tensor(ids)

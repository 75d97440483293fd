"""Reference answers as responses, for supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mmrl.errors import UserError
from mmrl.policies.vlm.responses.tokens import ChatTokenizer
from mmrl.policies.vlm.turns import demonstrated_responses
from mmrl.rollouts import Prompt, Rollouts


def demonstrate(tokens: ChatTokenizer, prompts: Sequence[Prompt], temperature: float) -> Rollouts:
    """Returns rollouts of the prompts with their reference answers as responses.

    temperature: the one at which their log-probabilities are computed. Raises UserError for a demonstration of several
    responses, which needs an environment.
    """
    answers = []
    for prompt in prompts:
        texts = demonstrated_responses(prompt)
        if len(texts) != 1:
            raise UserError(
                f"the demonstration of prompt {prompt.id} has {len(texts)} responses; set task.environment, which "
                "answers each of them, or give a single response"
            )
        answers.append(demonstrated_ids(tokens, prompt, texts[0]))
    rows = [
        replace(row, response=answer, temperature=temperature)
        for row, answer in zip(tokens.encode(prompts), answers, strict=True)
    ]
    return tokens.rollouts(prompts, rows, 1)


def demonstrated_ids(tokens: ChatTokenizer, prompt: Prompt, text: str) -> Tensor:
    """Returns the ids of a demonstrated response, followed by an end token, [token] int64. Raises UserError if it is
    too long, or if it holds tokens that the policy never samples."""
    ids = tokens.ids(text) + [tokens.eos[0]]
    if len(ids) > tokens.max_response_length:
        raise UserError(
            f"the demonstration of prompt {prompt.id} has {len(ids)} tokens, more than "
            f"rollout.max_response_length={tokens.max_response_length}; raise it, or shorten the demonstration"
        )
    if never_sampled := set(ids) & set(tokens.suppressed):
        raise UserError(
            f"the demonstration of prompt {prompt.id} holds {tokens.tokenizer.decode(list(never_sampled))}, a special "
            "token that the policy never samples; remove it"
        )
    return torch.tensor(ids)

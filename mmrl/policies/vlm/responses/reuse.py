"""Responses that are made of others: stored and made again, changed prompts, joined, or gone on with from inside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from mmrl.generation.vllm.engine import Answering
from mmrl.policies.vlm.prompts import RolloutTokens
from mmrl.policies.vlm.responses.drafting import Drafter
from mmrl.policies.vlm.responses.tokens import ChatTokenizer
from mmrl.rollouts import Prompt, Rollouts


def stored(rows: Sequence[RolloutTokens]) -> list[dict[str, Any]]:
    """What `recalled` needs of each rollout beside its prompt."""
    return [{"response": row.response.tolist(), "temperature": row.temperature} for row in rows]


def recalled(tokens: ChatTokenizer, prompts: Sequence[Prompt], states: Sequence[dict[str, Any]]) -> Rollouts:
    """Rollouts as they were stored, not scored; their experts are chosen anew."""
    rows = [
        replace(row, response=torch.tensor(state["response"]), temperature=state["temperature"])
        for row, state in zip(tokens.encode(prompts), states, strict=True)
    ]
    return tokens.rollouts(prompts, rows, 1)


def continued(
    drafter: Drafter, engine: Answering | None, rollouts: Rollouts, lengths: Sequence[int], seeds: Sequence[int]
) -> Rollouts:
    """Of each response the first so many tokens, and what is sampled after them; not scored."""
    prompts = {id(sample.prompt): sample.prompt for sample in rollouts.samples}
    opened = dict(zip(prompts, drafter.draft(list(prompts.values()), 1, [0] * len(prompts)), strict=True))
    drafts = []
    for sample, row, length, seed in zip(rollouts.samples, rollouts.inputs, lengths, seeds, strict=True):
        draft = opened[id(sample.prompt)]
        draft = replace(draft, request=replace(draft.request, seed=seed))
        draft.grow(row.response[:length], torch.zeros(length), None)
        drafts.append(draft)
    drafter.extend(engine, drafts, drafter.max_response_length)
    return drafter.complete(drafts, 1, drawn_here=engine is None)


def recombined(tokens: ChatTokenizer, first: Rollouts, second: Rollouts, text: str) -> Rollouts:
    """Responses that are one of `first` without its end token, the text, and one of `second`, whose tokens alone are
    decisions; not scored."""
    between, rows = torch.tensor(tokens.ids(text)), []
    for one, other in zip(first.inputs, second.inputs, strict=True):
        begun = one.response[:-1] if int(one.response[-1]) in tokens.eos else one.response
        read = replace(one.asked(), temperature=other.temperature, experts=None).followed(
            torch.cat([begun, between]), decided=False
        )
        rows.append(read.followed(other.response, decided=True))
    made = tokens.rollouts([sample.prompt for sample in first.samples], rows, 1)
    chosen = nn.utils.rnn.pad_sequence([row.chosen for row in rows], batch_first=True)
    return replace(made, mask=made.mask & chosen)


def with_prompts(tokens: ChatTokenizer, rollouts: Rollouts, change: Callable[[Prompt], Prompt]) -> Rollouts:
    """The same responses to changed prompts. A prompt is changed and encoded once for its whole group."""
    prompts = {id(sample.prompt): sample.prompt for sample in rollouts.samples}
    encoded = dict(zip(prompts, tokens.encode([change(prompt) for prompt in prompts.values()]), strict=True))
    inputs = [
        row.answering(encoded[id(sample.prompt)]) for sample, row in zip(rollouts.samples, rollouts.inputs, strict=True)
    ]
    return replace(rollouts, inputs=inputs)

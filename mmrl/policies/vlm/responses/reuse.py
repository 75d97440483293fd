"""Responses made from others: stored and restored, with changed prompts, joined, or continued from inside."""

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
    """Returns what `recalled` needs of each rollout besides its prompt."""
    return [{"response": row.response.tolist(), "temperature": row.temperature} for row in rows]


def recalled(tokens: ChatTokenizer, prompts: Sequence[Prompt], states: Sequence[dict[str, Any]]) -> Rollouts:
    """Returns rollouts as they were stored, not scored; their experts are chosen anew."""
    rows = [
        replace(row, response=torch.tensor(state["response"]), temperature=state["temperature"])
        for row, state in zip(tokens.encode(prompts), states, strict=True)
    ]
    return tokens.rollouts(prompts, rows, 1)


def continued(
    drafter: Drafter, engine: Answering | None, rollouts: Rollouts, lengths: Sequence[int], seeds: Sequence[int]
) -> Rollouts:
    """Keeps the first lengths[i] tokens of each response and samples the rest; not scored."""
    prompts = {id(sample.prompt): sample.prompt for sample in rollouts.samples}
    opened = dict(zip(prompts, drafter.draft(list(prompts.values()), 1, [0] * len(prompts)), strict=True))
    drafts = []
    for sample, row, length, seed in zip(rollouts.samples, rollouts.inputs, lengths, seeds, strict=True):
        draft = opened[id(sample.prompt)]
        draft = replace(draft, request=replace(draft.request, seed=seed))
        draft.grow(row.response[:length], torch.zeros(length), None)
        drafts.append(draft)
    drafter.extend(engine, drafts, drafter.max_response_length)
    return drafter.complete(drafts, 1, by_model=engine is None)


def recombined(tokens: ChatTokenizer, first: Rollouts, second: Rollouts, text: str) -> Rollouts:
    """Returns responses of `first` without their end token, the text, and responses of `second`, whose tokens alone are
    decisions; not scored."""
    between, rows = torch.tensor(tokens.ids(text)), []
    for one, other in zip(first.inputs, second.inputs, strict=True):
        beginning = one.response[:-1] if int(one.response[-1]) in tokens.eos else one.response
        read = replace(one.without_response(), temperature=other.temperature, experts=None).extended(
            torch.cat([beginning, between]), decided=False
        )
        rows.append(read.extended(other.response, decided=True))
    rollouts = tokens.rollouts([sample.prompt for sample in first.samples], rows, 1)
    chosen = nn.utils.rnn.pad_sequence([row.chosen for row in rows], batch_first=True)
    return replace(rollouts, mask=rollouts.mask & chosen)


def with_prompts(tokens: ChatTokenizer, rollouts: Rollouts, change: Callable[[Prompt], Prompt]) -> Rollouts:
    """Returns the same responses to changed prompts. A prompt is changed and encoded once for its whole group."""
    prompts = {id(sample.prompt): sample.prompt for sample in rollouts.samples}
    encoded = dict(zip(prompts, tokens.encode([change(prompt) for prompt in prompts.values()]), strict=True))
    inputs = [
        row.with_prompt(encoded[id(sample.prompt)])
        for sample, row in zip(rollouts.samples, rollouts.inputs, strict=True)
    ]
    return replace(rollouts, inputs=inputs)

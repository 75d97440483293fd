"""Responses made from others: stored and restored, with changed prompts, joined, or continued from inside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.generation.vllm.engine import Answering
from mmrl.policies.vlm.responses.drafting import Drafter
from mmrl.policies.vlm.responses.tokens import ChatTokenizer
from mmrl.rollouts import Prompt, Rollouts


def serialize(rollouts: Rollouts) -> list[dict[str, Any]]:
    """Returns what `deserialize` needs of each rollout besides its prompt."""
    states = []
    for row, sample in zip(rollouts.inputs, rollouts.samples, strict=True):
        state: dict[str, Any] = {"response": row.response.tolist(), "temperature": row.temperature}
        if sample.conversation is not None:
            end = {"end": sample.conversation.end, "limit": sample.max_response_length}
            state |= {"decided": row.chosen.tolist(), **end}
        states.append(state)
    return states


def deserialize(drafter: Drafter, prompts: Sequence[Prompt], states: Sequence[dict[str, Any]]) -> Rollouts:
    """Returns rollouts as they were stored, not scored; their experts are chosen anew."""
    tokens = drafter.tokens
    if drafter.conversations is not None:
        return drafter.conversations.deserialize(drafter, prompts, states)
    rows = [
        replace(row, response=torch.tensor(state["response"]), temperature=state["temperature"])
        for row, state in zip(tokens.encode(prompts), states, strict=True)
    ]
    return tokens.rollouts(prompts, rows, 1)


def continue_from(
    drafter: Drafter, engine: Answering | None, rollouts: Rollouts, lengths: Sequence[int], seeds: Sequence[int]
) -> Rollouts:
    """Keeps the first lengths[i] tokens of each response, of those that the policy chose, and samples the rest; not
    scored."""
    if drafter.conversations is not None:
        begun = list(drafter.conversations.begun(drafter, rollouts, lengths, seeds))
        drafter.extend(engine, begun, drafter.max_response_length)
        return drafter.complete(begun, 1, by_model=engine is None)
    prompts = {id(sample.prompt): sample.prompt for sample in rollouts.samples}
    opened = dict(zip(prompts, drafter.draft(list(prompts.values()), 1, [0] * len(prompts)), strict=True))
    drafts = []
    for sample, row, length, seed in zip(rollouts.samples, rollouts.inputs, lengths, seeds, strict=True):
        draft = opened[id(sample.prompt)]
        # The rollout's own tensors, by which its prompt is read once for it and what goes on from it
        begun = replace(row.without_response(), temperature=draft.tokens.temperature, experts=None)
        draft = replace(draft, request=replace(draft.request, seed=seed), tokens=begun)
        draft.grow(row.response[:length], unsampled(length), None)
        drafts.append(draft)
    drafter.extend(engine, drafts, drafter.max_response_length)
    return drafter.complete(drafts, 1, by_model=engine is None)


def unsampled(count: int) -> Tensor:
    """Returns log-probabilities of `count` tokens that this engine did not sample, [token] NaN: a correction of what
    engine and trainer differ in leaves them alone."""
    return torch.full((count,), torch.nan)


def join_responses(tokens: ChatTokenizer, first: Rollouts, second: Rollouts, text: str) -> Rollouts:
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


def with_prompts(drafter: Drafter, rollouts: Rollouts, change: Callable[[Prompt], Prompt]) -> Rollouts:
    """Returns the same responses to changed prompts, and in conversations with changed images of observations. A prompt
    is changed and encoded once for its whole group."""
    prompts = {id(sample.prompt): sample.prompt for sample in rollouts.samples}
    encoded = dict(zip(prompts, drafter.tokens.encode([change(p) for p in prompts.values()]), strict=True))
    inputs = []
    for sample, row in zip(rollouts.samples, rollouts.inputs, strict=True):
        viewed = row.with_prompt(encoded[id(sample.prompt)])
        if row.read_images and drafter.conversations is not None:
            viewed = replace(viewed, read_images=drafter.conversations.viewed_images(row, sample, change))
        inputs.append(viewed)
    return replace(rollouts, inputs=inputs)

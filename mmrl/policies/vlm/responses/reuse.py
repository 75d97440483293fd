"""Builds new rollouts from earlier ones: stores and rebuilds them, changes their prompts, joins their responses, or
samples again from some token."""

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
    """Returns for each rollout the values from which `deserialize` rebuilds it, besides its prompt, as JSON types."""
    states = []
    for row, sample in zip(rollouts.inputs, rollouts.samples, strict=True):
        state: dict[str, Any] = {"response": row.response.tolist(), "temperature": row.temperature}
        if sample.conversation is not None:
            state["decided"] = row.decision_mask.tolist()
            state |= {"end": sample.conversation.end, "limit": sample.max_response_length}
        states.append(state)
    return states


def deserialize(drafter: Drafter, prompts: Sequence[Prompt], states: Sequence[dict[str, Any]]) -> Rollouts:
    """Rebuilds unscored rollouts from the values of `serialize`. Recorded experts are not stored, so the model's own
    router selects experts in replay."""
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
    """Keeps the first lengths[i] tokens that the policy sampled in response i, and samples the rest with seeds[i].

    engine: None if the model itself samples. Returns rollouts without rewards.
    """
    if drafter.conversations is not None:
        conversations = list(drafter.conversations.first_parts(drafter, rollouts, lengths, seeds))
        drafter.extend(engine, conversations, drafter.max_response_length)
        return drafter.complete(conversations, 1, by_model=engine is None)
    prompts = {id(sample.prompt): sample.prompt for sample in rollouts.samples}
    empty_drafts = dict(zip(prompts, drafter.draft(list(prompts.values()), 1, [0] * len(prompts)), strict=True))
    drafts = []
    for sample, row, length, seed in zip(rollouts.samples, rollouts.inputs, lengths, seeds, strict=True):
        draft = empty_drafts[id(sample.prompt)]
        # The same prompt tensor as in the rollout: rows that share it share one pass over the prompt
        tokens = replace(row.without_response(), temperature=draft.tokens.temperature, experts=None)
        draft = replace(draft, request=replace(draft.request, seed=seed), tokens=tokens)
        draft.append(row.response[:length], unknown_logp(length), None)
        drafts.append(draft)
    drafter.extend(engine, drafts, drafter.max_response_length)
    return drafter.complete(drafts, 1, by_model=engine is None)


def unknown_logp(num_tokens: int) -> Tensor:
    """Returns NaN as the log-probabilities of tokens that the engine did not sample, [token]. Importance-sampling
    corrections between engine and trainer ignore NaN."""
    return torch.full((num_tokens,), torch.nan)


def join_responses(tokens: ChatTokenizer, first: Rollouts, second: Rollouts, text: str) -> Rollouts:
    """Joins each response of `first` (without its end token), `text` and the response of `second` to one response.

    Only the tokens of `second` are decisions, which are trained on. Returns unscored rollouts.
    """
    text_ids, rows = torch.tensor(tokens.ids(text)), []
    for first_row, second_row in zip(first.inputs, second.inputs, strict=True):
        prefix = first_row.response[:-1] if int(first_row.response[-1]) in tokens.eos else first_row.response
        prompt = replace(first_row.without_response(), temperature=second_row.temperature, experts=None)
        row = prompt.extended(torch.cat([prefix, text_ids]), decided=False)
        rows.append(row.extended(second_row.response, decided=True))
    rollouts = tokens.rollouts([sample.prompt for sample in first.samples], rows, 1)
    decision_mask = nn.utils.rnn.pad_sequence([row.decision_mask for row in rows], batch_first=True)
    return replace(rollouts, mask=rollouts.mask & decision_mask)


def with_prompts(drafter: Drafter, rollouts: Rollouts, change: Callable[[Prompt], Prompt]) -> Rollouts:
    """Returns the same responses to changed prompts; in conversations the images of observations are changed too.

    `change` is called, and the prompt encoded, once per group.
    """
    prompts = {id(sample.prompt): sample.prompt for sample in rollouts.samples}
    encoded = dict(zip(prompts, drafter.tokens.encode([change(p) for p in prompts.values()]), strict=True))
    inputs = []
    for sample, row in zip(rollouts.samples, rollouts.inputs, strict=True):
        viewed = row.with_prompt(encoded[id(sample.prompt)])
        if row.observed_images and drafter.conversations is not None:
            viewed = replace(viewed, observed_images=drafter.conversations.viewed_images(row, sample, change))
        inputs.append(viewed)
    return replace(rollouts, inputs=inputs)

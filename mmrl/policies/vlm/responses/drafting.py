"""Unfinished responses (`Draft`; speculative decoding is not meant): started, continued by the model or by an engine,
and finished."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.generation.sampling import Sampling
from mmrl.generation.vllm.engine import Answering, Request
from mmrl.policies.vlm.drafts import Draft
from mmrl.policies.vlm.prompts import chat_texts, images_of, videos_of
from mmrl.policies.vlm.responses.demonstrations import demonstrated_ids
from mmrl.policies.vlm.responses.runner import ModelRunner, distinct_rows
from mmrl.policies.vlm.turns import Conversations, conversing
from mmrl.rollouts import Prompt, Rollouts
from mmrl.schedules.schedule import Schedule
from mmrl.sims.turns.settings import EnvironmentSettings


class Drafter:
    """Samples responses by the model or by an engine. temperature: the default. conversations: where an environment
    answers responses."""

    def __init__(self, runner: ModelRunner, sampling: Sampling, temperature: Schedule) -> None:
        self.runner, self.tokens, self.sampling, self.temperature = runner, runner.tokens, sampling, temperature
        self.conversations: Conversations | None = None

    def converse(self, settings: EnvironmentSettings) -> None:
        """Makes rollouts conversations: environments answer responses."""
        self.conversations = Conversations(settings, self.tokens.processor, self.tokens.eos)

    @property
    def max_response_length(self) -> int:
        """Tokens of the longest response that is sampled now."""
        return self.tokens.max_response_length

    def anywhere(self, count: int) -> bool:
        """Returns whether `count` is above 0; under ZeRO-3, on any rank."""
        return self.runner.anywhere(count)

    def demonstrated_ids(self, prompt: Prompt, text: str) -> Tensor:
        """Returns the tokens of a response that ends, [token]. Raises UserError for one that the policy could not
        give."""
        return demonstrated_ids(self.tokens, prompt, text)

    def sample(
        self, prompts: Sequence[Prompt], group_size: int, seeds: Sequence[int], temperature: float, limit: int
    ) -> Rollouts:
        """Samples rollouts by the model itself, of at most `limit` tokens."""
        if self.conversations is not None:
            drafts = self.draft(prompts, group_size, seeds, limit=limit, temperature=temperature)
            self.extend(None, drafts, limit)
            return self.complete(drafts, group_size, by_model=True)
        rows = [tokens for tokens in self.tokens.encode(prompts) for _ in range(group_size)]
        each = [prompt for prompt in prompts for _ in range(group_size)]
        with self.runner.gathered_weights():
            sampling = replace(self.sampling, temperature=temperature)
            responses = self.runner.generate(rows, seeds, sampling, [limit] * len(rows))
        replay_temperature = temperature or 1.0  # greedy responses are replayed as they are
        answered = [
            replace(t, response=r, temperature=replay_temperature) for t, r in zip(rows, responses, strict=True)
        ]
        return self.tokens.rollouts(each, answered, group_size)

    def ask(
        self,
        engine: Answering,
        prompts: Sequence[Prompt],
        group_size: int,
        seeds: Sequence[int],
        *,
        limit: int,
        temperature: float | None = None,
    ) -> Rollouts:
        """Samples rollouts by an engine, whose log-probabilities are kept as behaviour_logp. The model has no part in
        it."""
        drafts = self.draft(prompts, group_size, seeds, limit=limit, temperature=temperature)
        self.extend(engine, drafts, limit)
        return self.complete(drafts, group_size)

    def draft(
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        seeds: Sequence[int],
        *,
        limit: int | None = None,
        temperature: float | None = None,
    ) -> list[Draft]:
        """Returns unfinished responses, still without tokens, `group_size` a prompt. A group is drawn with the first of
        its seeds and those that follow it, by which an engine takes it as one request. A response is sampled at one
        temperature, by default the current one."""
        sampling_temperature = self.temperature.value if temperature is None else temperature
        dialogues = None if self.conversations is None else self.conversations.open(prompts, group_size)
        if dialogues is not None:
            prompts = [dialogue.prompt for dialogue in dialogues[::group_size]]
        encoded = [replace(tokens, temperature=sampling_temperature) for tokens in self.tokens.encode(prompts)]
        marked = self.tokens.tokenizer(chat_texts(self.tokens.processor, prompts)).input_ids
        limit, drafts = limit or self.max_response_length, []
        for prompt, ids, tokens, seed in zip(prompts, marked, encoded, seeds[::group_size], strict=True):
            first = Request(prompt.id, ids, images_of(prompt), tokens.prompt, seed, limit, videos=videos_of(prompt))
            group = [replace(first, seed=seed + i) for i in range(group_size)]
            drafts += [Draft(prompt, request, tokens, torch.zeros(0)) for request in group]
        return drafts if dialogues is None else conversing(drafts, dialogues)

    def extend(self, engine: Answering | None, drafts: Sequence[Draft], count: int) -> None:
        """Extends each unfinished response by up to `count` tokens. What is drawn depends on its seed and temperature,
        its tokens so far and the weights; not on when that is. Without an engine the model draws."""
        with self.runner.gathered_weights() if engine is None else nullcontext():
            if self.conversations is not None:
                self.conversations.extend(self, engine, drafts, count)  # type: ignore[arg-type]
                return
            unfinished = [draft for draft in drafts if not draft.finished(self.tokens.eos)]
            self.continue_all(engine, [(draft, draft.next(count)) for draft in unfinished])

    def continue_all(self, engine: Answering | None, pairs: Sequence[tuple[Draft, Request]]) -> None:
        """Continues each unfinished response by the answer to its request; those of one temperature go together."""
        for temperature in dict.fromkeys(draft.tokens.temperature for draft, _ in pairs):
            drafts, requests = zip(*[pair for pair in pairs if pair[0].tokens.temperature == temperature], strict=True)
            sampling = replace(self.sampling, temperature=temperature)
            if engine is None:
                self._draw(drafts, requests, sampling)
            else:
                self._ask(engine, drafts, requests, sampling)

    def _draw(self, drafts: Sequence[Draft], requests: Sequence[Request], sampling: Sampling) -> None:
        """Continues each unfinished response by the model itself, up to the `limit` tokens of its request. Their
        log-probabilities stay 0: updates compute them."""
        rows, seeds = [draft.tokens for draft in drafts], [request.seed for request in requests]
        answers = self.runner.generate(rows, seeds, sampling, [request.limit for request in requests])
        for draft, ids in zip(drafts, answers, strict=True):
            draft.grow(ids, torch.zeros(len(ids)), None)

    def _ask(self, engine: Answering, drafts: Sequence[Draft], requests: Sequence[Request], sampling: Sampling) -> None:
        """Continues each unfinished response by the engine, with its log-probabilities and, where they are recorded,
        the experts that it routed tokens to."""
        drawn = engine.generate(requests, sampling=sampling, eos=self.tokens.eos)
        rows = [draft.tokens for draft in drafts]
        self.runner.flops.sampled(rows, distinct_rows(rows)[0], [answer.ids for answer in drawn])
        for draft, request, answer in zip(drafts, requests, drawn, strict=True):
            experts = None
            if self.runner.routing is not None:
                length = len(request.ids) + len(answer.ids) - 1
                experts = self.runner.routing.check(request.name, length, answer.experts)
            draft.grow(answer.ids, answer.logp, experts)

    def restore(self, drafts: Sequence[Draft], states: Sequence[dict[str, Any]]) -> None:
        """Restores the states of unfinished responses. Raises UserError where an environment does not repeat its
        answers."""
        for draft, state in zip(drafts, states, strict=True):
            if self.conversations is not None:
                self.conversations.restore(draft, state)  # type: ignore[arg-type]
            else:
                draft.grow(state["response"], state["logp"], state["experts"])

    def complete(self, drafts: Sequence[Draft], group_size: int, *, by_model: bool = False) -> Rollouts:
        """Returns finished responses as rollouts, `group_size` a prompt. by_model: sampled by the model itself, so that
        there are no log-probabilities of another generator."""
        rows = [replace(draft.tokens, temperature=draft.tokens.temperature or 1.0) for draft in drafts]
        if self.conversations is not None:
            rollouts = self.conversations.rollouts(drafts, rows, group_size, self)  # type: ignore[arg-type]
        else:
            rollouts = self.tokens.rollouts([draft.prompt for draft in drafts], rows, group_size)
        if not by_model:
            rollouts.behaviour_logp = nn.utils.rnn.pad_sequence([draft.logp for draft in drafts], batch_first=True)
        return rollouts

"""Samples responses: starts drafts (unfinished responses; not the drafts of speculative decoding), continues them with
the model or with vLLM, and turns them into rollouts."""

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
from mmrl.policies.vlm.turns import Conversations, conversation_drafts
from mmrl.rollouts import Prompt, Rollouts
from mmrl.schedules.schedule import Schedule
from mmrl.sims.turns.settings import EnvironmentSettings


class Drafter:
    """Samples responses, with the model or with an engine (vLLM). `conversations` is set if an environment answers the
    responses."""

    def __init__(self, runner: ModelRunner, sampling: Sampling, temperature: Schedule) -> None:
        """temperature: the default sampling temperature."""
        self.runner, self.tokens, self.sampling, self.temperature = runner, runner.tokens, sampling, temperature
        self.conversations: Conversations | None = None

    def converse(self, settings: EnvironmentSettings) -> None:
        """Makes every rollout a conversation with an environment of these settings."""
        self.conversations = Conversations(settings, self.tokens.processor, self.tokens.eos)

    @property
    def max_response_length(self) -> int:
        """The maximum length of a response at the current step, in tokens."""
        return self.tokens.max_response_length

    def any_rank_positive(self, number: int) -> bool:
        """Returns whether `number` is above 0 on this rank, or under ZeRO-3 on any rank."""
        return self.runner.any_rank_positive(number)

    def demonstrated_ids(self, prompt: Prompt, text: str) -> Tensor:
        """Returns the ids of a demonstrated response and an end token, [token]; see
        `demonstrations.demonstrated_ids`."""
        return demonstrated_ids(self.tokens, prompt, text)

    def sample(
        self, prompts: Sequence[Prompt], group_size: int, seeds: Sequence[int], temperature: float, limit: int
    ) -> Rollouts:
        """Samples rollouts with the model itself, `group_size` per prompt, of at most `limit` response tokens."""
        if self.conversations is not None:
            drafts = self.draft(prompts, group_size, seeds, limit=limit, temperature=temperature)
            self.extend(None, drafts, limit)
            return self.complete(drafts, group_size, by_model=True)
        rows = [tokens for tokens in self.tokens.encode(prompts) for _ in range(group_size)]
        row_prompts = [prompt for prompt in prompts for _ in range(group_size)]
        with self.runner.gathered_weights():
            sampling = replace(self.sampling, temperature=temperature)
            responses = self.runner.generate(rows, seeds, sampling, [limit] * len(rows))
        logp_temperature = temperature or 1.0  # of greedy responses (temperature 0) log-probabilities are those at 1
        answered = [
            replace(row, response=response, temperature=logp_temperature)
            for row, response in zip(rows, responses, strict=True)
        ]
        return self.tokens.rollouts(row_prompts, answered, group_size)

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
        """Samples rollouts with an engine, and keeps the engine's log-probabilities as `behaviour_logp`. limit: largest
        number of response tokens; temperature: None: the temperature of the current step."""
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
        """Returns drafts without response tokens, `group_size` per prompt.

        seeds: one per draft. Of each group only the first seed s is used: draft i of the group gets s + i, so that vLLM
        can sample the group as one request. limit: maximum response tokens; None: the maximum of this step.
        temperature: None: the temperature of this step.
        """
        sampling_temperature = self.temperature.value if temperature is None else temperature
        dialogues = None if self.conversations is None else self.conversations.open(prompts, group_size)
        if dialogues is not None:
            prompts = [dialogue.prompt for dialogue in dialogues[::group_size]]
        encoded = [replace(tokens, temperature=sampling_temperature) for tokens in self.tokens.encode(prompts)]
        # token ids as vLLM takes them, with one placeholder per image or video
        marked = self.tokens.tokenizer(chat_texts(self.tokens.processor, prompts)).input_ids
        limit, drafts = limit or self.max_response_length, []
        for prompt, ids, tokens, seed in zip(prompts, marked, encoded, seeds[::group_size], strict=True):
            request = Request(prompt.id, ids, images_of(prompt), tokens.prompt, seed, limit, videos=videos_of(prompt))
            group = [replace(request, seed=seed + i) for i in range(group_size)]
            drafts += [Draft(prompt, member, tokens, torch.zeros(0)) for member in group]
        return drafts if dialogues is None else conversation_drafts(drafts, dialogues)

    def extend(self, engine: Answering | None, drafts: Sequence[Draft], count: int) -> None:
        """Extends each unfinished draft by up to `count` tokens, sampled by the engine, or by the model if `engine` is
        None.

        The new tokens depend on seed, temperature, the tokens so far and the weights, not on the other drafts.
        """
        with self.runner.gathered_weights() if engine is None else nullcontext():
            if self.conversations is not None:
                self.conversations.extend(self, engine, drafts, count)  # type: ignore[arg-type]
                return
            unfinished = [draft for draft in drafts if not draft.finished(self.tokens.eos)]
            self.continue_all(engine, [(draft, draft.next_request(count)) for draft in unfinished])

    def continue_all(self, engine: Answering | None, pairs: Sequence[tuple[Draft, Request]]) -> None:
        """Samples the answers to (draft, request) pairs and appends them to the drafts; one call per temperature."""
        for temperature in dict.fromkeys(draft.tokens.temperature for draft, _ in pairs):
            drafts, requests = zip(*[pair for pair in pairs if pair[0].tokens.temperature == temperature], strict=True)
            sampling = replace(self.sampling, temperature=temperature)
            if engine is None:
                self._sample_with_model(drafts, requests, sampling)
            else:
                self._sample_with_engine(engine, drafts, requests, sampling)

    def _sample_with_model(self, drafts: Sequence[Draft], requests: Sequence[Request], sampling: Sampling) -> None:
        """Samples up to `request.limit` tokens per draft with the model. Their log-probabilities are set to 0: the
        update computes them."""
        rows, seeds = [draft.tokens for draft in drafts], [request.seed for request in requests]
        answers = self.runner.generate(rows, seeds, sampling, [request.limit for request in requests])
        for draft, ids in zip(drafts, answers, strict=True):
            draft.append(ids, torch.zeros(len(ids)), None)

    def _sample_with_engine(
        self, engine: Answering, drafts: Sequence[Draft], requests: Sequence[Request], sampling: Sampling
    ) -> None:
        """Samples up to `request.limit` tokens per draft with the engine, and keeps its log-probabilities and, with
        routing replay, the experts of each token."""
        answers = engine.generate(requests, sampling=sampling, eos=self.tokens.eos)
        rows = [draft.tokens for draft in drafts]
        # distinct_rows(rows)[0]: rows without repetitions, each of which the engine computes once
        self.runner.flops.sampled(rows, distinct_rows(rows)[0], [answer.ids for answer in answers])
        for draft, request, answer in zip(drafts, requests, answers, strict=True):
            experts = None
            if self.runner.routing is not None:
                length = len(request.ids) + len(answer.ids) - 1  # the last token has not been an input yet
                experts = self.runner.routing.check(request.name, length, answer.experts)
            draft.append(answer.ids, answer.logp, experts)

    def restore(self, drafts: Sequence[Draft], states: Sequence[dict[str, Any]]) -> None:
        """Appends the tokens of saved states (`Draft.state`) to new drafts. Raises UserError if an environment answers
        them differently than before."""
        for draft, state in zip(drafts, states, strict=True):
            if self.conversations is not None:
                self.conversations.restore(draft, state)  # type: ignore[arg-type]
            else:
                draft.append(state["response"], state["logp"], state["experts"])

    def complete(self, drafts: Sequence[Draft], group_size: int, *, by_model: bool = False) -> Rollouts:
        """Returns finished drafts as rollouts, `group_size` per prompt.

        by_model: whether the model itself sampled them; the rollouts then get no `behaviour_logp`.
        """
        rows = [replace(draft.tokens, temperature=draft.tokens.temperature or 1.0) for draft in drafts]
        if self.conversations is not None:
            rollouts = self.conversations.rollouts(drafts, rows, group_size, self)  # type: ignore[arg-type]
        else:
            rollouts = self.tokens.rollouts([draft.prompt for draft in drafts], rows, group_size)
        if not by_model:
            rollouts.behaviour_logp = nn.utils.rnn.pad_sequence([draft.logp for draft in drafts], batch_first=True)
        return rollouts

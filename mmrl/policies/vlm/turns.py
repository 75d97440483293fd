"""Responses of several turns: what a policy samples, and the observations in between.

Token in, token out: sampled ids are never made into text and back. The chat template's text between two responses and
an observation's images are added as tokens of their own, which are not decisions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
from PIL import Image
from torch import Tensor, nn

from mmrl.errors import UserError
from mmrl.generation.vllm.engine import Answering, Request
from mmrl.policies.tokenizers import Processor
from mmrl.policies.vlm.drafts import Draft, continued_seed
from mmrl.policies.vlm.prompts import RolloutTokens, between, chat, joined_images, read
from mmrl.policies.vlm.responses.thoughts import opens_thoughts
from mmrl.rollouts import Message, Prompt, Rollouts, Sample, Turns
from mmrl.sims.turns.dialogue import Dialogue
from mmrl.sims.turns.processes import Processes
from mmrl.sims.turns.settings import EnvironmentSettings
from mmrl.sims.turns.timed import TimedEnvironments

_log = logging.getLogger(__name__)


ENDS = {
    "environment": "the environment ended it",
    "turns": "the limit is task.environment.limits.max_turns",
    "length": "the limit is rollout.max_response_length, of all tokens after the prompt",
    "lost": "lost",
}


@dataclass(eq=False)
class ConversationDraft(Draft):
    """An unfinished conversation. `request` is for its first response; its `limit` counts all tokens after the
    prompt."""

    dialogue: Dialogue
    turn_tokens: int
    begin: int = 0  # index in the response at which the present turn begins
    turns: list[Tensor] = field(default_factory=list)  # [token] int64 each, the turn of each token of the response
    marked: list[int] = field(default_factory=list)  # token ids for vLLM: one placeholder an image, not expanded
    images: tuple[Image.Image, ...] = ()

    def finished(self, eos: tuple[int, ...]) -> bool:
        return self.dialogue.end is not None

    def whole(self, eos: tuple[int, ...]) -> bool:
        """Returns whether the present response has ended."""
        response = self.tokens.response
        return len(response) > self.begin and int(response[-1]) in eos

    @property
    def room(self) -> int:
        """Tokens that the present turn may still get."""
        length = len(self.tokens.response)
        return min(self.request.limit - length, self.begin + self.turn_tokens - length)

    def next(self, count: int) -> Request:
        response = self.tokens.response
        return replace(
            self.request,
            marked=self.marked,
            images=self.images,
            ids=torch.cat([self.tokens.prompt, response]),
            seed=continued_seed(self.request.seed, len(response)),
            limit=min(count, self.room),
        )

    def grow(self, ids: Tensor, logp: Tensor, experts: Tensor | None) -> None:
        """Appends sampled tokens to the present turn, as tokens that the policy chose (`decided`), not observations.
        ids: [token] int64; logp: [token]; experts: not recorded in conversations."""
        self.tokens = self.tokens.extended(ids, decided=True)
        self.logp = torch.cat([self.logp, logp])
        self.turns.append(torch.full_like(ids, len(self.dialogue.turns)))
        self.marked = [*self.marked, *ids.tolist()]

    def state(self) -> dict[str, Tensor | None]:
        return {"response": self.tokens.response, "logp": self.logp, "decided": self.tokens.chosen}

    def observe(self, observation: RolloutTokens, marked: list[int], images: Sequence[Image.Image]) -> None:
        """Appends an observation to the response, if that leaves tokens for an answer; else the conversation ends.
        marked: the observation's token ids with one placeholder an image, as vLLM takes them."""
        if len(self.tokens.response) + len(observation.prompt) >= self.request.limit:
            self.dialogue.finish("length")
            return
        self.tokens = self.tokens.with_observation(observation)
        self.logp = torch.cat([self.logp, torch.zeros(len(observation.prompt))])
        self.turns.append(torch.full_like(observation.prompt, len(self.dialogue.turns) - 1))
        self.marked, self.images = [*self.marked, *marked], (*self.images, *images)
        self.begin = len(self.tokens.response)


class ConversingPolicy(Protocol):
    """The policy of a conversation, as far as conversations use it."""

    @property
    def max_response_length(self) -> int: ...

    def anywhere(self, count: int) -> bool: ...

    def continue_all(self, engine: Answering | None, pairs: Sequence[tuple[Draft, Request]]) -> None: ...

    def draft(self, prompts: Sequence[Prompt], group_size: int, seeds: Sequence[int]) -> Sequence[Any]: ...

    def demonstrated_ids(self, prompt: Prompt, text: str, /) -> Tensor: ...


class Conversations:
    """Starts and continues conversations of a policy with environments."""

    def __init__(self, settings: EnvironmentSettings, processor: Processor, eos: tuple[int, ...]) -> None:
        self.settings, self.processor, self.tokenizer, self.eos = settings, processor, processor.tokenizer, eos
        isolation = settings.isolated
        self.make = TimedEnvironments(settings).make if isolation is None else Processes(settings, isolation).make
        self.at_once = None if isolation is None else isolation.at_once  # None: in this process, one after the other
        self.counted = {"environment/lost": 0.0, "environment/tool_errors": 0.0}
        self.lost = 0  # conversations that their environment failed, in the whole run

    # --- beginnings ---

    def open(self, prompts: Sequence[Prompt], group_size: int) -> list[Dialogue]:
        """Starts an environment for each rollout; those of a group begin alike."""
        prompts = [prompt.before_start or replace(prompt, messages=chat(prompt)) for prompt in prompts]
        chats = [prompt for prompt in prompts for _ in range(group_size)]
        with self.stepping() as steps:
            dialogues = list(steps.map(self._start, chats))
        for first in range(0, len(dialogues), group_size):
            group = [dialogue for dialogue in dialogues[first : first + group_size] if dialogue.end is None]
            for dialogue in group:
                dialogue.join(group[0].prompt)
        return dialogues

    def _start(self, prompt: Prompt) -> Dialogue:
        return Dialogue(self.make(), prompt, self.settings.limits)

    def stepping(self) -> LocalSteps:
        return LocalSteps() if self.at_once is None else ThreadedSteps(self.at_once)

    # --- turns ---

    def extend(
        self, policy: ConversingPolicy, engine: Answering | None, drafts: Sequence[ConversationDraft], count: int
    ) -> None:
        """Extends each draft by up to `count` tokens of its own, over as many turns as these last. Environments in
        processes of their own answer while the policy generates for those that have been answered."""
        left = {id(draft): count for draft in drafts}
        with self.stepping() as steps:
            while True:
                self.show(steps.done(block=False))
                ready = self.ready(drafts, left, steps)
                if not ready and steps.waiting:
                    self.show(steps.done(block=True))
                    ready = self.ready(drafts, left, steps)
                if not policy.anywhere(len(ready) + len(steps.waiting)):
                    return
                before = [len(draft.tokens.response) for draft in ready]
                policy.continue_all(engine, [(draft, draft.next(left[id(draft)])) for draft in ready])
                for draft, length in zip(ready, before, strict=True):
                    left[id(draft)] -= len(draft.tokens.response) - length
                for draft in ready:
                    if draft.whole(self.eos):
                        steps.begin(draft, partial(draft.dialogue.answer, self.text(draft)))
                    elif draft.room == 0:
                        draft.dialogue.cut(self.text(draft))

    @staticmethod
    def ready(drafts: Sequence[ConversationDraft], left: dict[int, int], steps: LocalSteps) -> list[ConversationDraft]:
        """Returns the drafts that the policy may continue."""
        return [d for d in drafts if d.dialogue.end is None and left[id(d)] > 0 and id(d) not in steps.waiting]

    def text(self, draft: ConversationDraft) -> str:
        """Returns the text of the present response."""
        return self.tokenizer.decode(draft.tokens.response[draft.begin :], skip_special_tokens=True)

    def show(self, answered: Sequence[tuple[ConversationDraft, tuple[Message, ...]]]) -> None:
        """Appends the answers of environments to the drafts."""
        answered = [(draft, observation) for draft, observation in answered if observation]
        texts = [self._bridge(draft, observation) for draft, observation in answered]
        images = [[image for message in observation for image in message.images] for _, observation in answered]
        names = [f"an observation after prompt {draft.prompt.id}" for draft, _ in answered]
        encoded = read(self.processor, texts, images, names, inside=True)
        for (draft, _), text, tokens, added in zip(answered, texts, encoded, images, strict=True):
            draft.observe(tokens, self.tokenizer(text, add_special_tokens=False).input_ids, added)

    def _bridge(self, draft: ConversationDraft, observation: Sequence[Message]) -> str:
        """Returns the template's text from the end of the last response to the beginning of the next one."""
        ending = self.tokenizer.decode(draft.tokens.response[-1:])
        return between(self.processor, history(draft.dialogue), observation, ending)

    def restore(self, draft: ConversationDraft, state: dict[str, Tensor]) -> None:
        """Has the environment answer the responses of `state` again. Raises UserError where its answers differ."""
        response = state["response"]
        self.answer_again(draft, response, state["decided"], state["logp"])
        if len(draft.tokens.response) != len(response):
            raise changed_answer(draft)

    def answer_again(self, draft: ConversationDraft, response: Tensor, decided: Tensor, logp: Tensor) -> None:
        """Has the environment answer the beginning of a response, [token]. Raises UserError where its answers
        differ."""
        while draft.dialogue.end is None and len(draft.tokens.response) < len(response):
            begin = len(draft.tokens.response)
            read = (~decided[begin:]).nonzero()
            end = begin + int(read[0]) if len(read) else len(response)
            if end == begin:  # a shorter answer than before, after which the policy would have to say nothing
                raise changed_answer(draft)
            draft.grow(response[begin:end], logp[begin:end], None)
            self.follow(draft)
        count = min(len(response), len(draft.tokens.response))
        if not torch.equal(draft.tokens.response[:count], response[:count]):
            raise changed_answer(draft)

    def deserialize(
        self, policy: ConversingPolicy, prompts: Sequence[Prompt], states: Sequence[dict[str, Any]]
    ) -> Rollouts:
        """Returns conversations as `reuse.stored` has them: the environment answers their responses again. Raises
        UserError where its answers differ."""
        drafts: list[ConversationDraft] = policy.draft(prompts, 1, [0] * len(prompts))  # type: ignore[assignment]
        for draft, state in zip(drafts, states, strict=True):
            response, decided = torch.tensor(state["response"]), torch.tensor(state["decided"])
            limit = max(state["limit"], len(response))
            draft.request = replace(draft.request, limit=limit)
            draft.tokens = replace(draft.tokens, temperature=state["temperature"])
            self.restore(draft, {"response": response, "decided": decided, "logp": torch.zeros(len(response))})
            if draft.dialogue.end is None:
                draft.dialogue.finish(state["end"])
        return self.rollouts(drafts, [draft.tokens for draft in drafts], 1, policy, counts=False)

    def begun(
        self,
        policy: ConversingPolicy,
        rollouts: Rollouts,
        lengths: Sequence[int],
        seeds: Sequence[int],
    ) -> Sequence[ConversationDraft]:
        """Returns unfinished conversations with the first lengths[i] tokens that the policy chose, which the
        environment answers again. Raises UserError where its answers differ."""
        prompts = [sample.prompt for sample in rollouts.samples]
        drafts: list[ConversationDraft] = policy.draft(prompts, 1, seeds)  # type: ignore[assignment]
        for draft, row, length in zip(drafts, rollouts.inputs, lengths, strict=True):
            draft.tokens = replace(draft.tokens, temperature=row.temperature)
            chosen = row.chosen.nonzero().flatten()[:length]
            end = int(chosen[-1]) + 1 if length and len(chosen) else 0
            self.answer_again(draft, row.response[:end], row.chosen[:end], torch.full((end,), torch.nan))
        return drafts

    # --- views ---

    def viewed_images(
        self, row: RolloutTokens, sample: Sample, change: Callable[[Prompt], Prompt]
    ) -> dict[str, Tensor]:
        """Returns the inputs of a conversation's observed images under a change of prompts; what observations say
        stays. Raises UserError for a change that leaves other messages or sizes of images."""
        record = sample.conversation
        assert record is not None
        shown = [turn.observation for turn in record.turns if turn.observation]
        ends_observed = not bool(row.chosen[-1])
        if record.turns and record.turns[-1].observation and not ends_observed:
            shown = shown[:-1]  # there was no room for it
        first, flat = sample.prompt.messages, [message for observation in shown for message in observation]
        changed = change(replace(sample.prompt, messages=(*first, *flat))).messages[len(first) :]
        if len(changed) != len(flat):
            raise UserError(f"a view of prompt {sample.prompt.id} changed the number of its messages")
        left, parts = iter(changed), []
        names = [f"an observation after prompt {sample.prompt.id}"]
        for observation in shown:
            images = [image for _ in observation for image in next(left).images]
            if [image.size for image in images] != [image.size for each in observation for image in each.images]:
                raise UserError(f"a view of prompt {sample.prompt.id} changed the number or the size of its images")
            if images:
                text = between(self.processor, first, observation, "")
                parts.append(read(self.processor, [text], [images], names, inside=True)[0].images)
        return joined_images(parts)

    def follow(self, draft: ConversationDraft) -> None:
        """Appends what comes after the draft's last token: the environment's answer where the response has ended."""
        if draft.whole(self.eos):
            self.show([(draft, draft.dialogue.answer(self.text(draft)))])
        elif draft.room == 0:
            draft.dialogue.cut(self.text(draft))

    # --- demonstrations ---

    def demonstrate(self, policy: ConversingPolicy, prompts: Sequence[Prompt]) -> Rollouts:
        """Returns conversations with given responses: a list in `prompt.metadata["demonstration"]`, or a single one.
        The environment answers them as it would the policy.

        Raises UserError for one that the policy could not hold, or in which the environment fails.
        """
        drafts: list[ConversationDraft] = policy.draft(prompts, 1, [0] * len(prompts))  # type: ignore[assignment]
        responses = [demonstrated(prompt) for prompt in prompts]
        for number in range(max(map(len, responses))):
            ongoing = [(draft, texts) for draft, texts in zip(drafts, responses, strict=True) if number < len(texts)]
            for draft, texts in ongoing:
                if draft.dialogue.end is not None:
                    raise UserError(
                        f"the demonstration of prompt {draft.prompt.id} has {len(texts)} responses, but the "
                        f"conversation ended after {number} ({draft.dialogue.problem or ENDS[draft.dialogue.end]})"
                    )
                ids = policy.demonstrated_ids(draft.prompt, texts[number])
                draft.grow(ids, torch.zeros(len(ids)), None)
            self.show([(draft, draft.dialogue.answer(texts[number])) for draft, texts in ongoing])
        for draft in drafts:
            if draft.dialogue.end is None:
                draft.dialogue.finish("demonstration")
        return self.rollouts(drafts, [draft.tokens for draft in drafts], 1, policy)

    # --- ends ---

    def rollouts(
        self,
        drafts: Sequence[ConversationDraft],
        rows: list[RolloutTokens],
        group_size: int,
        policy: ConversingPolicy,
        *,
        counts: bool = True,
    ) -> Rollouts:
        """Builds rollouts of finished conversations; no token of a lost one counts. counts: faults of environments are
        counted, as they are once."""
        masks = [tokens.chosen & (draft.dialogue.end != "lost") for tokens, draft in zip(rows, drafts, strict=True)]
        return Rollouts(
            samples=[self.sample(draft, policy.max_response_length, counts=counts) for draft in drafts],
            inputs=rows,
            group=torch.arange(len(rows)) // group_size,
            mask=nn.utils.rnn.pad_sequence(masks, batch_first=True),
            extras={"turns": turns_of(drafts)},
        )

    def sample(self, draft: ConversationDraft, longest: int, *, counts: bool = True) -> Sample:
        record = draft.dialogue.record
        if record.end == "lost":
            self._warn_lost(draft.prompt, record.problem)
        if counts:
            self.counted["environment/lost"] += record.end == "lost"
            self.counted["environment/tool_errors"] += sum(turn.error is not None for turn in record.turns)
        return Sample(
            prompt=draft.prompt,
            response=record.turns[-1].response if record.turns else "",
            response_length=int(draft.tokens.chosen.sum()),
            truncated=record.end == "length",
            max_response_length=longest,
            conversation=record,
            prompt_opens_think=self._opens_thoughts(draft.tokens, draft.begin),
        )

    def _opens_thoughts(self, tokens: RolloutTokens, begin: int) -> bool:
        """Returns whether the text before the response that begins at a token ends in <think>."""
        return opens_thoughts(self.tokenizer, torch.cat([tokens.prompt, tokens.response[:begin]]))

    def _warn_lost(self, prompt: Prompt, problem: str) -> None:
        """Warns of a lost conversation the first time, the tenth, the hundredth and so on."""
        self.lost += 1
        if str(self.lost).strip("0") == "1":
            _log.warning(
                "the environment lost its conversation about prompt %s: %s (number %d)", prompt.id, problem, self.lost
            )

    def counts(self) -> dict[str, float]:
        """Returns counts since the last call."""
        counts, self.counted = self.counted, dict.fromkeys(self.counted, 0.0)
        return counts


class LocalSteps:
    """Answers of environments in this process: each is computed when it is begun."""

    def __init__(self) -> None:
        self.waiting: dict[int, Any] = {}  # by the draft's id
        self._done: list[tuple[ConversationDraft, tuple[Message, ...]]] = []

    def __enter__(self) -> LocalSteps:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def map(self, function: Callable[[Prompt], Dialogue], prompts: Sequence[Prompt]) -> Iterable[Dialogue]:
        return map(function, prompts)

    def begin(self, draft: ConversationDraft, answer: Callable[[], tuple[Message, ...]]) -> None:
        self._done.append((draft, answer()))

    def done(self, *, block: bool) -> list[tuple[ConversationDraft, tuple[Message, ...]]]:
        """Returns the answers since the last call. block: waits for at least one, if any is due."""
        answers, self._done = self._done, []
        return answers


class ThreadedSteps(LocalSteps):
    """Answers of environments elsewhere: one thread waits for each."""

    def __init__(self, at_once: int) -> None:
        super().__init__()
        self._pool = ThreadPoolExecutor(at_once, "environment")

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown()

    def map(self, function: Callable[[Prompt], Dialogue], prompts: Sequence[Prompt]) -> Iterable[Dialogue]:
        return self._pool.map(function, prompts)

    def begin(self, draft: ConversationDraft, answer: Callable[[], tuple[Message, ...]]) -> None:
        self.waiting[id(draft)] = (draft, self._pool.submit(answer))

    def done(self, *, block: bool) -> list[tuple[ConversationDraft, tuple[Message, ...]]]:
        if block:
            wait([future for _, future in self.waiting.values()], return_when=FIRST_COMPLETED)
        answers = [(draft, future.result()) for draft, future in self.waiting.values() if future.done()]
        for draft, _ in answers:
            del self.waiting[id(draft)]
        return answers


def conversing(drafts: Sequence[Draft], dialogues: Sequence[Dialogue]) -> list[Draft]:
    """Returns drafts of first responses as drafts of conversations."""
    conversations: list[Draft] = []
    for draft, dialogue in zip(drafts, dialogues, strict=True):
        request = draft.request
        conversation = ConversationDraft(
            prompt=draft.prompt,
            request=request,
            tokens=draft.tokens,
            logp=draft.logp,
            dialogue=dialogue,
            turn_tokens=dialogue.limits.turn_tokens or request.limit,
            marked=request.marked,
            images=request.images,
        )
        if dialogue.end is not None:  # lost before it began: a token stands in for the response
            conversation.tokens = conversation.tokens.extended(torch.tensor([0]), decided=False)
            conversation.logp = torch.zeros(1)
        conversations.append(conversation)
    return conversations


def changed_answer(draft: ConversationDraft) -> UserError:
    """Returns the error of an environment that does not repeat its answers."""
    return UserError(
        f"the environment did not answer prompt {draft.prompt.id} as it did before; what it does must follow from the "
        "prompt and the responses"
    )


def demonstrated(prompt: Prompt) -> list[str]:
    """Returns the responses of a prompt's demonstration, which may be a function that returns them; else its answer."""
    demonstration = prompt.metadata.get("demonstration", prompt.answer)
    demonstration = demonstration() if callable(demonstration) else demonstration
    return [str(text) for text in demonstration] if isinstance(demonstration, list) else [str(demonstration)]


def history(dialogue: Dialogue) -> list[Message]:
    """Returns all messages before the last response."""
    messages = list(dialogue.prompt.messages)
    for turn in dialogue.turns[:-1]:
        messages += [Message("assistant", (turn.response,)), *turn.observation]
    return messages


def turns_of(drafts: Sequence[ConversationDraft]) -> Turns:
    """Returns the turn of each decision, a mask of turns, none of a lost conversation, and their rewards."""
    pad = nn.utils.rnn.pad_sequence
    numbers = [torch.cat(draft.turns) if draft.turns else torch.zeros(1, dtype=torch.int64) for draft in drafts]
    rewards = [torch.tensor([turn.reward for turn in draft.dialogue.turns] or [0.0]) for draft in drafts]
    mask = [torch.full((max(1, len(draft.dialogue.turns)),), draft.dialogue.end != "lost") for draft in drafts]
    return Turns(*(pad(values, batch_first=True) for values in (numbers, mask, rewards)))

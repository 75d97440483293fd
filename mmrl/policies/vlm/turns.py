"""Multi-turn conversations of a policy with environments.

A conversation is one sequence of tokens: the sampled ids, and between the turns the tokens of the observations with the
chat template's text around them, which are masked out of the loss. Sampled ids are never decoded and encoded again.
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
from mmrl.policies.vlm.prompts import RolloutTokens, between, chat, encode_texts, joined_images
from mmrl.policies.vlm.responses.thoughts import opens_thoughts
from mmrl.rollouts import Message, Prompt, Rollouts, Sample, Turns
from mmrl.sims.turns.dialogue import Dialogue
from mmrl.sims.turns.processes import Processes
from mmrl.sims.turns.settings import EnvironmentSettings
from mmrl.sims.turns.timed import TimedEnvironments

_log = logging.getLogger(__name__)


# Why a conversation ended (`Dialogue.end`), as error messages say it
END_REASONS = {
    "environment": "the environment ended it",
    "turns": "the limit is task.environment.limits.max_turns",
    "length": "the limit is rollout.max_response_length, of all tokens after the prompt",
    "lost": "the environment failed",
}


@dataclass(eq=False)
class ConversationDraft(Draft):
    """An unfinished conversation.

    `tokens.response` holds all tokens after the prompt: the policy's turns and the observations. `request.limit` is its
    maximum length.
    """

    dialogue: Dialogue  # the environment, and the turns so far
    turn_tokens: int  # maximum number of tokens of one turn of the policy
    turn_start: int = 0  # index in the response at which the policy's current turn starts
    # [token] int64 each, the number of the turn of each token; concatenated they are as long as the response
    turns: list[Tensor] = field(default_factory=list)
    marked: list[int] = field(default_factory=list)  # token ids for vLLM, in which each image is one placeholder token
    images: tuple[Image.Image, ...] = ()  # of prompt and observations

    def finished(self, eos: tuple[int, ...]) -> bool:
        """Returns whether the conversation has ended, for whatever reason."""
        return self.dialogue.end is not None

    def turn_ended(self, eos: tuple[int, ...]) -> bool:
        """Returns whether the policy has ended its current turn with one of the end tokens `eos`."""
        response = self.tokens.response
        return len(response) > self.turn_start and int(response[-1]) in eos

    @property
    def remaining_turn_tokens(self) -> int:
        """The number of tokens that the policy may still add to its current turn."""
        length = len(self.tokens.response)
        return min(self.request.limit - length, self.turn_start + self.turn_tokens - length)

    def next_request(self, max_tokens: int) -> Request:
        """Returns the request for up to `max_tokens` more tokens of the current turn."""
        response = self.tokens.response
        return replace(
            self.request,
            marked=self.marked,
            images=self.images,
            ids=torch.cat([self.tokens.prompt, response]),
            seed=continued_seed(self.request.seed, len(response)),
            limit=min(max_tokens, self.remaining_turn_tokens),
        )

    def append(self, ids: Tensor, logp: Tensor, experts: Tensor | None) -> None:
        """Appends tokens that the policy sampled to its current turn.

        ids: [token] int64; logp: [token]; experts: not used, routing is not recorded in conversations.
        """
        self.tokens = self.tokens.extended(ids, decided=True)
        self.logp = torch.cat([self.logp, logp])
        self.turns.append(torch.full_like(ids, len(self.dialogue.turns)))
        self.marked = [*self.marked, *ids.tolist()]

    def state(self) -> dict[str, Tensor | None]:
        """Returns the values to checkpoint; `Conversations.restore` has a new environment answer the same turns
        again."""
        return {"response": self.tokens.response, "logp": self.logp, "decided": self.tokens.decision_mask}

    def observe(self, observation: RolloutTokens, marked: list[int], images: Sequence[Image.Image]) -> None:
        """Appends an observation to the response, or ends the conversation if no tokens would be left for an answer.

        observation: as encoded by `encode_texts`. marked: its token ids with one placeholder per image, as vLLM takes
        them.
        """
        if len(self.tokens.response) + len(observation.prompt) >= self.request.limit:
            self.dialogue.finish("length")
            return
        self.tokens = self.tokens.with_observation(observation)
        self.logp = torch.cat([self.logp, torch.zeros(len(observation.prompt))])
        self.turns.append(torch.full_like(observation.prompt, len(self.dialogue.turns) - 1))
        self.marked, self.images = [*self.marked, *marked], (*self.images, *images)
        self.turn_start = len(self.tokens.response)


class ConversingPolicy(Protocol):
    """A policy that can continue conversations; `Drafter` implements it."""

    @property
    def max_response_length(self) -> int: ...

    def any_rank_positive(self, number: int) -> bool: ...

    def continue_all(self, engine: Answering | None, pairs: Sequence[tuple[Draft, Request]]) -> None: ...

    def draft(self, prompts: Sequence[Prompt], group_size: int, seeds: Sequence[int]) -> Sequence[Any]: ...

    def demonstrated_ids(self, prompt: Prompt, text: str, /) -> Tensor: ...


class Conversations:
    """Starts and continues conversations of a policy with environments."""

    def __init__(self, settings: EnvironmentSettings, processor: Processor, eos: tuple[int, ...]) -> None:
        """eos: ids of the tokens that end a turn of the policy."""
        self.settings, self.processor, self.tokenizer, self.eos = settings, processor, processor.tokenizer, eos
        isolation = settings.isolated
        self.make = TimedEnvironments(settings).make if isolation is None else Processes(settings, isolation).make
        # How many environments answer at the same time, each in its own process; None: one by one, in this process
        self.at_once = None if isolation is None else isolation.at_once
        self.metrics = {"environment/lost": 0.0, "environment/tool_errors": 0.0}  # since the last call of `counts`
        self.lost = 0  # number of conversations of this run whose environment failed

    # --- beginnings ---

    def open(self, prompts: Sequence[Prompt], group_size: int) -> list[Dialogue]:
        """Starts one environment per rollout, `group_size` per prompt.

        An environment may change the prompt; all rollouts of a group then get the changed prompt of the first one.
        """
        # `before_start`: the prompt before an environment changed it
        prompts = [prompt.before_start or replace(prompt, messages=chat(prompt)) for prompt in prompts]
        row_prompts = [prompt for prompt in prompts for _ in range(group_size)]
        with self.stepping() as steps:
            dialogues = list(steps.map(self._start, row_prompts))
        for first in range(0, len(dialogues), group_size):
            group = [dialogue for dialogue in dialogues[first : first + group_size] if dialogue.end is None]
            for dialogue in group:
                dialogue.join(group[0].prompt)
        return dialogues

    def _start(self, prompt: Prompt) -> Dialogue:
        """Starts an environment for one rollout."""
        return Dialogue(self.make(), prompt, self.settings.limits)

    def stepping(self) -> LocalSteps:
        """Returns the executor of environment steps: in this process, or with threads that wait for other processes."""
        return LocalSteps() if self.at_once is None else ThreadedSteps(self.at_once)

    # --- turns ---

    def extend(
        self, policy: ConversingPolicy, engine: Answering | None, drafts: Sequence[ConversationDraft], count: int
    ) -> None:
        """Extends each draft by up to `count` tokens of the policy, which may be several turns.

        Environments in other processes answer some conversations while the policy generates for others. engine: vLLM;
        None: the policy's own model generates.
        """
        remaining = {id(draft): count for draft in drafts}  # tokens that the policy may still add
        with self.stepping() as steps:
            while True:
                self.append_observations(steps.results(block=False))
                ready = self.ready(drafts, remaining, steps)
                if not ready and steps.pending:
                    self.append_observations(steps.results(block=True))
                    ready = self.ready(drafts, remaining, steps)
                # under ZeRO-3 all ranks go on until the last one has finished
                if not policy.any_rank_positive(len(ready) + len(steps.pending)):
                    return
                old_lengths = [len(draft.tokens.response) for draft in ready]
                policy.continue_all(engine, [(draft, draft.next_request(remaining[id(draft)])) for draft in ready])
                for draft, old_length in zip(ready, old_lengths, strict=True):
                    remaining[id(draft)] -= len(draft.tokens.response) - old_length
                for draft in ready:
                    if draft.turn_ended(self.eos):
                        steps.submit(draft, partial(draft.dialogue.answer, self.text(draft)))
                    elif draft.remaining_turn_tokens == 0:
                        draft.dialogue.cut(self.text(draft))

    @staticmethod
    def ready(
        drafts: Sequence[ConversationDraft], remaining: dict[int, int], steps: LocalSteps
    ) -> list[ConversationDraft]:
        """Returns the drafts that the policy may continue now. remaining: tokens that each draft may still get, by the
        draft's id()."""
        return [d for d in drafts if d.dialogue.end is None and remaining[id(d)] > 0 and id(d) not in steps.pending]

    def text(self, draft: ConversationDraft) -> str:
        """Returns the text of the policy's current turn."""
        return self.tokenizer.decode(draft.tokens.response[draft.turn_start :], skip_special_tokens=True)

    def append_observations(self, answered: Sequence[tuple[ConversationDraft, tuple[Message, ...]]]) -> None:
        """Encodes observations and appends them to their drafts. answered: pairs of a draft and the messages with which
        its environment answered; drafts without messages are left out."""
        answered = [(draft, observation) for draft, observation in answered if observation]
        texts = [self._text_between(draft, observation) for draft, observation in answered]
        images = [[image for message in observation for image in message.images] for _, observation in answered]
        names = [f"an observation after prompt {draft.prompt.id}" for draft, _ in answered]
        encoded = encode_texts(self.processor, texts, images, names, inside=True)
        for (draft, _), text, tokens, new_images in zip(answered, texts, encoded, images, strict=True):
            draft.observe(tokens, self.tokenizer(text, add_special_tokens=False).input_ids, new_images)

    def _text_between(self, draft: ConversationDraft, observation: Sequence[Message]) -> str:
        """Returns the chat template's text from the end of the last turn of the policy to the start of its next one."""
        ending = self.tokenizer.decode(draft.tokens.response[-1:])
        return between(self.processor, history(draft.dialogue), observation, ending)

    def restore(self, draft: ConversationDraft, state: dict[str, Tensor]) -> None:
        """Rebuilds a conversation from the saved `state`: the environment answers its turns again. Raises UserError if
        an answer differs from the saved one."""
        response = state["response"]
        self.answer_again(draft, response, state["decided"], state["logp"])
        if len(draft.tokens.response) != len(response):
            raise answer_changed_error(draft)

    def answer_again(self, draft: ConversationDraft, response: Tensor, decided: Tensor, logp: Tensor) -> None:
        """Appends the tokens of `response` turn by turn, and has the environment answer each turn again.

        response: [token], turns and observations; decided: mask of the policy's tokens in it; logp: [token]. Raises
        UserError if an answer differs from the observation in `response`.
        """
        while draft.dialogue.end is None and len(draft.tokens.response) < len(response):
            begin = len(draft.tokens.response)
            observed = (~decided[begin:]).nonzero()
            end = begin + int(observed[0]) if len(observed) else len(response)
            if end == begin:  # the new observation is shorter than the old one
                raise answer_changed_error(draft)
            draft.append(response[begin:end], logp[begin:end], None)
            self.append_answer(draft)
        length = min(len(response), len(draft.tokens.response))
        if not torch.equal(draft.tokens.response[:length], response[:length]):
            raise answer_changed_error(draft)

    def deserialize(
        self, policy: ConversingPolicy, prompts: Sequence[Prompt], states: Sequence[dict[str, Any]]
    ) -> Rollouts:
        """Rebuilds conversations from the values of `reuse.serialize`: environments answer their turns again. Raises
        UserError if an answer differs."""
        drafts: list[ConversationDraft] = policy.draft(prompts, 1, [0] * len(prompts))  # type: ignore[assignment]
        for draft, state in zip(drafts, states, strict=True):
            response, decided = torch.tensor(state["response"]), torch.tensor(state["decided"])
            draft.request = replace(draft.request, limit=max(state["limit"], len(response)))
            draft.tokens = replace(draft.tokens, temperature=state["temperature"])
            self.restore(draft, {"response": response, "decided": decided, "logp": torch.zeros(len(response))})
            if draft.dialogue.end is None:
                draft.dialogue.finish(state["end"])
        return self.rollouts(drafts, [draft.tokens for draft in drafts], 1, policy, counts=False)

    def first_parts(
        self,
        policy: ConversingPolicy,
        rollouts: Rollouts,
        lengths: Sequence[int],
        seeds: Sequence[int],
    ) -> Sequence[ConversationDraft]:
        """Returns unfinished conversations that hold the first lengths[i] tokens of the policy in rollout i and the
        observations between them; environments answer these turns again. Raises UserError if an answer differs."""
        prompts = [sample.prompt for sample in rollouts.samples]
        drafts: list[ConversationDraft] = policy.draft(prompts, 1, seeds)  # type: ignore[assignment]
        for draft, row, length in zip(drafts, rollouts.inputs, lengths, strict=True):
            draft.tokens = replace(draft.tokens, temperature=row.temperature)
            positions = row.decision_mask.nonzero().flatten()[:length]
            end = int(positions[-1]) + 1 if length and len(positions) else 0
            self.answer_again(draft, row.response[:end], row.decision_mask[:end], torch.full((end,), torch.nan))
        return drafts

    def append_answer(self, draft: ConversationDraft) -> None:
        """Appends the environment's answer if the policy has ended its turn; ends the conversation if no tokens are
        left for the turn."""
        if draft.turn_ended(self.eos):
            self.append_observations([(draft, draft.dialogue.answer(self.text(draft)))])
        elif draft.remaining_turn_tokens == 0:
            draft.dialogue.cut(self.text(draft))

    # --- views ---

    def viewed_images(
        self, row: RolloutTokens, sample: Sample, change: Callable[[Prompt], Prompt]
    ) -> dict[str, Tensor]:
        """Returns the model inputs of a conversation's observed images after `change`, such as a mask over images.

        row, sample: the rollout. change: changes a prompt; it gets the observations as further messages of the prompt.
        The text of observations does not change. Raises UserError if `change` alters the number of messages, or the
        number or size of images.
        """
        record = sample.conversation
        assert record is not None
        observations = [turn.observation for turn in record.turns if turn.observation]
        ends_observed = not bool(row.decision_mask[-1])
        if record.turns and record.turns[-1].observation and not ends_observed:
            observations = observations[:-1]  # too long for the response: it was not appended
        first, flat = sample.prompt.messages, [message for observation in observations for message in observation]
        changed = change(replace(sample.prompt, messages=(*first, *flat))).messages[len(first) :]
        if len(changed) != len(flat):
            raise UserError(
                "change() of a view returned fewer or more messages than the conversation of prompt "
                f"{sample.prompt.id} has; return as many"
            )
        changed_messages, parts = iter(changed), []
        names = [f"an observation after prompt {sample.prompt.id}"]
        for observation in observations:
            images = [image for _ in observation for image in next(changed_messages).images]
            old_images = [image for message in observation for image in message.images]
            if [image.size for image in images] != [image.size for image in old_images]:
                raise UserError(
                    f"change() of a view changed the number or the size of images in the conversation of prompt "
                    f"{sample.prompt.id}; keep both"
                )
            if images:  # only the images of this encoding are used, so the text around them need not be exact
                text = between(self.processor, first, observation, "")
                parts.append(encode_texts(self.processor, [text], [images], names, inside=True)[0].images)
        return joined_images(parts)

    # --- demonstrations ---

    def demonstrate(self, policy: ConversingPolicy, prompts: Sequence[Prompt]) -> Rollouts:
        """Returns demonstrated conversations, for supervised fine-tuning: the policy's turns are the texts of the
        prompt's demonstration, which the environment answers.

        The turns are the list of texts in `prompt.metadata["demonstration"]`, or one text. Raises UserError if the
        environment ends a conversation before its last turn, or if a turn is too long or holds tokens that the policy
        never samples.
        """
        drafts: list[ConversationDraft] = policy.draft(prompts, 1, [0] * len(prompts))  # type: ignore[assignment]
        responses = [demonstrated_responses(prompt) for prompt in prompts]
        for number in range(max(map(len, responses))):
            ongoing = [(draft, texts) for draft, texts in zip(drafts, responses, strict=True) if number < len(texts)]
            for draft, texts in ongoing:
                if draft.dialogue.end is not None:
                    reason = draft.dialogue.problem or END_REASONS[draft.dialogue.end]
                    raise UserError(
                        f"the demonstration of prompt {draft.prompt.id} has {len(texts)} responses, but the "
                        f"conversation ended after {number} ({reason}); shorten the demonstration, or change what "
                        "ended it"
                    )
                ids = policy.demonstrated_ids(draft.prompt, texts[number])
                draft.append(ids, torch.zeros(len(ids)), None)
            self.append_observations([(draft, draft.dialogue.answer(texts[number])) for draft, texts in ongoing])
        for draft in drafts:
            if draft.dialogue.end is None:
                draft.dialogue.finish("demonstration")
        return self.rollouts(drafts, [draft.tokens for draft in drafts], 1, policy)

    # --- finished conversations ---

    def rollouts(
        self,
        drafts: Sequence[ConversationDraft],
        rows: list[RolloutTokens],
        group_size: int,
        policy: ConversingPolicy,
        *,
        counts: bool = True,
    ) -> Rollouts:
        """Builds rollouts of finished conversations; a conversation whose environment failed ("lost") is masked out.

        rows: the tokens of the conversations. counts: whether lost conversations and tool errors are added to the
        metrics; False if they were added before.
        """
        masks = []
        for row, draft in zip(rows, drafts, strict=True):
            masks.append(row.decision_mask & (draft.dialogue.end != "lost"))
        return Rollouts(
            samples=[self.sample(draft, policy.max_response_length, counts=counts) for draft in drafts],
            inputs=rows,
            group=torch.arange(len(rows)) // group_size,
            mask=nn.utils.rnn.pad_sequence(masks, batch_first=True),
            extras={"turns": turns_of(drafts)},
        )

    def sample(self, draft: ConversationDraft, max_response_length: int, *, counts: bool = True) -> Sample:
        """Returns a finished conversation as the sample that reward functions score; its response is the last turn.
        counts: see `rollouts`."""
        record = draft.dialogue.record
        if record.end == "lost":
            self._warn_lost(draft.prompt, record.problem)
        if counts:
            self.metrics["environment/lost"] += record.end == "lost"
            self.metrics["environment/tool_errors"] += sum(turn.error is not None for turn in record.turns)
        return Sample(
            prompt=draft.prompt,
            response=record.turns[-1].response if record.turns else "",
            response_length=int(draft.tokens.decision_mask.sum()),
            truncated=record.end == "length",
            max_response_length=max_response_length,
            conversation=record,
            prompt_opens_think=self._opens_thoughts(draft.tokens, draft.turn_start),
        )

    def _opens_thoughts(self, tokens: RolloutTokens, begin: int) -> bool:
        """Returns whether the text before the turn that begins at token `begin` of the response ends in <think>."""
        return opens_thoughts(self.tokenizer, torch.cat([tokens.prompt, tokens.response[:begin]]))

    def _warn_lost(self, prompt: Prompt, problem: str) -> None:
        """Logs a warning for lost conversation number 1, 10, 100 and so on."""
        self.lost += 1
        if str(self.lost).strip("0") == "1":
            _log.warning(
                "the environment of prompt %s failed, so its rollout is not trained on: %s (failure %d of this run)",
                prompt.id,
                problem,
                self.lost,
            )

    def counts(self) -> dict[str, float]:
        """Returns the numbers of lost conversations and of tool errors since the last call, as metrics."""
        metrics, self.metrics = self.metrics, dict.fromkeys(self.metrics, 0.0)
        return metrics


class LocalSteps:
    """Runs the answers of environments in this process, each as soon as it is submitted."""

    def __init__(self) -> None:
        self.pending: dict[int, Any] = {}  # (draft, future) of unfinished answers, by id of the draft
        self._done: list[tuple[ConversationDraft, tuple[Message, ...]]] = []

    def __enter__(self) -> LocalSteps:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def map(self, function: Callable[[Prompt], Dialogue], prompts: Sequence[Prompt]) -> Iterable[Dialogue]:
        """Applies `function`, which starts an environment, to all prompts."""
        return map(function, prompts)

    def submit(self, draft: ConversationDraft, answer: Callable[[], tuple[Message, ...]]) -> None:
        """Computes the environment's answer to a draft; `results` returns it."""
        self._done.append((draft, answer()))

    def results(self, *, block: bool) -> list[tuple[ConversationDraft, tuple[Message, ...]]]:
        """Returns the answers since the last call, with their drafts. block: wait for at least one if any is
        pending."""
        answers, self._done = self._done, []
        return answers


class ThreadedSteps(LocalSteps):
    """Runs the answers of environments in other processes; one thread waits for each."""

    def __init__(self, at_once: int) -> None:
        super().__init__()
        self._pool = ThreadPoolExecutor(at_once, "environment")

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown()

    def map(self, function: Callable[[Prompt], Dialogue], prompts: Sequence[Prompt]) -> Iterable[Dialogue]:
        return self._pool.map(function, prompts)

    def submit(self, draft: ConversationDraft, answer: Callable[[], tuple[Message, ...]]) -> None:
        self.pending[id(draft)] = (draft, self._pool.submit(answer))

    def results(self, *, block: bool) -> list[tuple[ConversationDraft, tuple[Message, ...]]]:
        """Returns the answers that are finished now, with their drafts. block: wait for at least one if any is
        pending."""
        if block:
            wait([future for _, future in self.pending.values()], return_when=FIRST_COMPLETED)
        answers = [(draft, future.result()) for draft, future in self.pending.values() if future.done()]
        for draft, _ in answers:
            del self.pending[id(draft)]
        return answers


def conversation_drafts(drafts: Sequence[Draft], dialogues: Sequence[Dialogue]) -> list[Draft]:
    """Turns drafts without response tokens into drafts of conversations, each with its dialogue."""
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
        if dialogue.end is not None:  # its environment did not start: one masked token is the response
            conversation.tokens = conversation.tokens.extended(torch.tensor([0]), decided=False)
            conversation.logp = torch.zeros(1)
        conversations.append(conversation)
    return conversations


def answer_changed_error(draft: ConversationDraft) -> UserError:
    """Returns the error for an environment that answered the same turns differently than before."""
    return UserError(
        f"the environment did not answer prompt {draft.prompt.id} as it did before; make its answers "
        "depend on nothing but the prompt and the responses"
    )


def demonstrated_responses(prompt: Prompt) -> list[str]:
    """Returns the demonstrated responses of a prompt. They are `metadata["demonstration"]`, which may be a text, a list
    of texts, or a function that returns either; if it is missing, the prompt's reference answer is the only
    response."""
    demonstration = prompt.metadata.get("demonstration", prompt.answer)
    demonstration = demonstration() if callable(demonstration) else demonstration
    return [str(text) for text in demonstration] if isinstance(demonstration, list) else [str(demonstration)]


def history(dialogue: Dialogue) -> list[Message]:
    """Returns all messages of a conversation before the policy's last turn."""
    messages = list(dialogue.prompt.messages)
    for turn in dialogue.turns[:-1]:
        messages += [Message("assistant", (turn.response,)), *turn.observation]
    return messages


def turns_of(drafts: Sequence[ConversationDraft]) -> Turns:
    """Returns the turns of conversations, padded: the turn number of each token [rollout, token], the mask of turns and
    their rewards [rollout, turn]. A lost conversation, whose environment failed, has a mask of False."""
    pad = nn.utils.rnn.pad_sequence
    numbers = [torch.cat(draft.turns) if draft.turns else torch.zeros(1, dtype=torch.int64) for draft in drafts]
    # a conversation without turns, whose environment did not start, gets one turn with reward 0, so no row is empty
    rewards = [torch.tensor([turn.reward for turn in draft.dialogue.turns] or [0.0]) for draft in drafts]
    mask = [torch.full((max(1, len(draft.dialogue.turns)),), draft.dialogue.end != "lost") for draft in drafts]
    return Turns(*(pad(values, batch_first=True) for values in (numbers, mask, rewards)))

"""Responses of several turns: what a policy samples, and what it reads in between.

Token in, token out: what was sampled is never made into text and back. The chat template's text between two responses
and an observation's pictures are added as tokens of their own, which are no decisions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from mmrl.sims.turns.dialogue import Dialogue
from mmrl.sims.turns.settings import EnvironmentSettings
from PIL import Image
from torch import Tensor, nn

from mmrl.errors import UserError
from mmrl.generation.vllm import Answering, Request
from mmrl.policies.vlm.drafts import Draft, continued_seed
from mmrl.policies.vlm.prompts import Tokens, between, chat, read
from mmrl.rollouts import Message, Prompt, Rollouts, Sample, Turns

if TYPE_CHECKING:
    from mmrl.policies.vlm.policy import VisionLanguagePolicy


@dataclass(eq=False)
class ConversationDraft(Draft):
    """A conversation in the making. `request` is for its first response; `limit` counts the tokens of all that comes
    after the prompt."""

    dialogue: Dialogue
    turn_tokens: int
    begin: int = 0  # where in the response the present turn begins
    turns: list[Tensor] = field(default_factory=list)  # [token] int64 each: of which turn a token of the response is
    marked: list[int] = field(default_factory=list)  # ids of prompt and response with one marker a picture
    images: tuple[Image.Image, ...] = ()

    def finished(self, eos: tuple[int, ...]) -> bool:
        return self.dialogue.end is not None

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
        self.tokens = self.tokens.followed(ids, decided=True)
        self.logp = torch.cat([self.logp, logp])
        self.turns.append(torch.full_like(ids, len(self.dialogue.turns)))
        self.marked = [*self.marked, *ids.tolist()]

    def see(self, more: Tokens, marked: list[int], images: Sequence[Image.Image]) -> None:
        """The response goes on with an observation, if that leaves room for an answer; else the conversation ends."""
        if len(self.tokens.response) + len(more.prompt) >= self.request.limit:
            self.dialogue.finish("length")
            return
        self.tokens = self.tokens.shown(more)
        self.logp = torch.cat([self.logp, torch.zeros(len(more.prompt))])
        self.turns.append(torch.full_like(more.prompt, len(self.dialogue.turns) - 1))
        self.marked, self.images = [*self.marked, *marked], (*self.images, *images)
        self.begin = len(self.tokens.response)


class Conversations:
    """Makes and goes on with conversations of a policy with environments."""

    def __init__(self, settings: EnvironmentSettings, processor: Any, eos: tuple[int, ...]) -> None:
        self.settings, self.processor, self.tokenizer, self.eos = settings, processor, processor.tokenizer, eos
        self.counted = {"environment/lost": 0.0, "environment/tool_errors": 0.0}

    # --- beginnings ---

    def open(self, prompts: Sequence[Prompt], group_size: int) -> list[Dialogue]:
        """An environment for each rollout, started; those of a group begin alike."""
        found = []
        for prompt in prompts:
            prompt = replace(prompt, messages=chat(prompt))
            group = [Dialogue(self.settings.make(), prompt, self.settings.limits) for _ in range(group_size)]
            first = next((d for d in group if d.end is None), group[0])
            for dialogue in group:
                if dialogue.end is None:
                    dialogue.join(first.prompt)
            found += group
        return found

    # --- turns ---

    def settle(self, drafts: Iterable[ConversationDraft]) -> None:
        """Responses that are whole go to their environments, and what these answer into the drafts."""
        answered: list[tuple[ConversationDraft, str, tuple[Message, ...]]] = []
        for draft in drafts:
            response = draft.tokens.response[draft.begin :]
            if len(response) == 0:
                continue
            text = self.tokenizer.decode(response, skip_special_tokens=True)
            if int(response[-1]) not in self.eos:
                if draft.room == 0:
                    draft.dialogue.cut(text)
                continue
            observation = draft.dialogue.answer(text)
            if observation:
                answered.append((draft, self._bridge(draft, observation), observation))
        images = [[image for message in observation for image in message.images] for _, _, observation in answered]
        texts = [text for _, text, _ in answered]
        shown = read(self.processor, texts, images, inside=True)
        for (draft, text, _), more, pictures in zip(answered, shown, images, strict=True):
            draft.see(more, self.tokenizer(text, add_special_tokens=False).input_ids, pictures)

    def _bridge(self, draft: ConversationDraft, observation: Sequence[Message]) -> str:
        """The template's text from the end of the last response to the beginning of the next one."""
        ending = self.tokenizer.decode(draft.tokens.response[-1:])
        return between(self.processor, history(draft.dialogue), observation, ending)

    def extend(
        self, policy: VisionLanguagePolicy, engine: Answering | None, drafts: Sequence[ConversationDraft], count: int
    ) -> None:
        """Each draft gets up to `count` tokens of its own more, over as many turns as these last."""
        left = {id(draft): count for draft in drafts}
        while True:
            ready = [draft for draft in drafts if draft.dialogue.end is None and left[id(draft)] > 0]
            if not policy.anywhere(len(ready)):
                return
            before = [len(draft.tokens.response) for draft in ready]
            policy.continue_all(engine, [(draft, draft.next(left[id(draft)])) for draft in ready])
            for draft, length in zip(ready, before, strict=True):
                left[id(draft)] -= len(draft.tokens.response) - length
            self.settle(ready)

    # --- demonstrations ---

    def demonstrate(self, policy: VisionLanguagePolicy, prompts: Sequence[Prompt]) -> Rollouts:
        """Conversations whose responses are given: a list in `prompt.metadata["demonstration"]`, or one of its own. The
        environment answers them as it would the policy.

        Raises UserError for one that the policy could not hold, or in which the environment fails.
        """
        drafts: list[ConversationDraft] = policy.draft(prompts, 1, [0] * len(prompts))  # type: ignore[assignment]
        said = [demonstrated(prompt) for prompt in prompts]
        for number in range(max(map(len, said))):
            going = [(draft, texts) for draft, texts in zip(drafts, said, strict=True) if number < len(texts)]
            for draft, texts in going:
                if draft.dialogue.end is not None:
                    raise UserError(
                        f"the demonstration of prompt {draft.prompt.id} has {len(texts)} responses, but the "
                        f"conversation ended after {number} ({draft.dialogue.problem or draft.dialogue.end})"
                    )
                ids = policy.demonstrated_ids(draft.prompt, texts[number])
                draft.grow(ids, torch.zeros(len(ids)), None)
            self.settle(draft for draft, _ in going)
        for draft in drafts:
            if draft.dialogue.end is None:
                draft.dialogue.finish("demonstration")
        rows = [replace(draft.tokens, temperature=1.0) for draft in drafts]
        return self.rollouts(drafts, rows, 1, policy)

    # --- ends ---

    def rollouts(
        self, drafts: Sequence[ConversationDraft], rows: list[Tokens], group_size: int, policy: VisionLanguagePolicy
    ) -> Rollouts:
        """Of conversations that are over; nothing of one that was lost counts."""
        kept = [tokens.chosen & (draft.dialogue.end != "lost") for tokens, draft in zip(rows, drafts, strict=True)]
        return Rollouts(
            samples=[self.sample(draft, policy.max_response_length) for draft in drafts],
            inputs=rows,
            group=torch.arange(len(rows)) // group_size,
            mask=nn.utils.rnn.pad_sequence(kept, batch_first=True),
            extras={"turns": turns_of(drafts)},
        )

    def sample(self, draft: ConversationDraft, longest: int) -> Sample:
        record = draft.dialogue.record
        self.counted["environment/lost"] += record.end == "lost"
        self.counted["environment/tool_errors"] += sum(turn.error is not None for turn in record.turns)
        return Sample(
            prompt=draft.prompt,
            response=record.turns[-1].response if record.turns else "",
            response_length=int(draft.tokens.chosen.sum()),
            truncated=record.end == "length",
            max_response_length=longest,
            conversation=record,
        )

    def counts(self) -> dict[str, float]:
        """Since they were last asked for."""
        found, self.counted = self.counted, dict.fromkeys(self.counted, 0.0)
        return found


def conversing(drafts: Sequence[Draft], dialogues: Sequence[Dialogue]) -> list[Draft]:
    """Drafts of first responses as drafts of conversations."""
    found: list[Draft] = []
    for draft, dialogue in zip(drafts, dialogues, strict=True):
        request = draft.request
        turn_tokens = dialogue.limits.turn_tokens or request.limit
        own = ConversationDraft(
            draft.prompt, request, draft.tokens, draft.logp, dialogue, turn_tokens, 0, [], request.marked, request.images
        )
        if dialogue.end is not None:  # lost before it began: a token stands for what never was
            own.tokens = own.tokens.followed(torch.tensor([0]), decided=False)
            own.logp = torch.zeros(1)
        found.append(own)
    return found


def demonstrated(prompt: Prompt) -> list[str]:
    """The responses of a prompt's demonstration, else its answer."""
    given = prompt.metadata.get("demonstration", prompt.answer)
    return [str(text) for text in given] if isinstance(given, list) else [str(given)]


def history(dialogue: Dialogue) -> list[Message]:
    """All that was said before the last response."""
    said = list(dialogue.prompt.messages)
    for turn in dialogue.turns[:-1]:
        said += [Message("assistant", (turn.response,)), *turn.observation]
    return said


def turns_of(drafts: Sequence[ConversationDraft]) -> Turns:
    """Of decisions and turns; the environment's rewards."""
    pad = nn.utils.rnn.pad_sequence
    numbers = [torch.cat(draft.turns) if draft.turns else torch.zeros(1, dtype=torch.int64) for draft in drafts]
    rewards = [torch.tensor([turn.reward for turn in draft.dialogue.turns] or [0.0]) for draft in drafts]
    mask = [torch.ones(max(1, len(draft.dialogue.turns)), dtype=torch.bool) for draft in drafts]
    return Turns(*(pad(values, batch_first=True) for values in (numbers, mask, rewards)))

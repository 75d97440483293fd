"""Language models that write pictures as codes, as policies: one decision a code, and one a token of text before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer

from mmrl.errors import UserError
from mmrl.generation.sampling import draw
from mmrl.kernels import token_logprob
from mmrl.policies.autoregressive_image.settings import CodeDemonstrations, CodeDrawing
from mmrl.policies.autoregressive_image.writers import ImageTokenWriter
from mmrl.rollouts import PARTS, DecisionColumn, Prompt, Replay, Rollouts, Sample, text_and_picture
from mmrl.runtime.files import share
from mmrl.samplers.chain import mixed
from mmrl.schedules.schedule import Schedule

TEXTS = 9001  # of the noises that text is drawn with


@dataclass(frozen=True)
class CodeRecord:
    """A prompt, what was written about it and the picture, on the CPU."""

    prompt: Tensor  # [token] int64
    tokens: Tensor  # [place] int64
    temperature: float
    text: Tensor  # [word] int64, before the codes; its end token too, where it has one


class CodeScorer(nn.Module):
    """What a model says of codes and of the text before them; this is the module that the engine wraps."""

    allowed: Tensor

    def __init__(self, model: nn.Module, writer: ImageTokenWriter, allowed: Tensor) -> None:
        """allowed: [word] bool, the tokens that text may hold; codes alone are written in a picture."""
        super().__init__()
        self.model, self.writer = model, writer
        self.register_buffer("allowed", allowed, persistent=False)

    def hidden(self, ids: Tensor, there: Tensor, **cache: Any) -> Any:
        """ids: [row, token]; there: [row, token], padded in front, which may begin before `ids`."""
        place = positions(there)[:, -ids.shape[1] :]
        return self.writer.hidden(self.model, ids, there.long(), position_ids=place, **cache)

    def logits(self, hidden: Tensor, guidance: float) -> Tensor:
        """[row, place, code] fp32 of codes. With guidance the second half of the rows is unconditional, and
        u + guidance (c - u) is left."""
        found = self.writer.codes(self.model, hidden).float()
        if guidance == 1:
            return found
        told, untold = found.chunk(2)
        return untold + guidance * (told - untold)

    def words(self, hidden: Tensor) -> Tensor:
        """[..., word] fp32 of text."""
        return self.writer.words(self.model, hidden).float().masked_fill(~self.allowed, -torch.inf)

    def forward(
        self,
        ids: Tensor,
        there: Tensor,
        tokens: Tensor,
        temperature: Tensor,
        guidance: float,
        text: Tensor,
        before: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """logp, entropy and sum of squared probabilities, [row, word + place] fp32, of `text` [row, word] and `tokens`
        [row, place].

        ids, there: [row, token], padded in front, without the last code; twice as many rows with guidance, which codes
        alone have. temperature: [row]. before: [row, word], the place in `ids` behind which each word of text stands.
        """
        hidden = self.hidden(ids, there, use_cache=False)
        heat = temperature[:, None, None]
        asked = [(self.logits(hidden[:, -tokens.shape[1] :], guidance) / heat, tokens - self.writer.first)]
        if text.shape[1]:
            rows = torch.arange(len(text), device=text.device)[:, None]
            asked.insert(0, (self.words(hidden[rows, before]) / heat, text))
        parts = []
        for logits, said in asked:
            found = token_logprob(logits.flatten(0, 1), said.flatten())
            parts.append([part.view(said.shape) for part in (found.logp, found.entropy, found.square_sum)])
        logp, entropy, square_sum = (torch.cat(part, 1) for part in zip(*parts, strict=True))
        return logp, entropy, square_sum


class CodePolicy:
    """Writes pictures code by code, and says how likely they were; guidance is the same in both.

    The first `reasoning_length` decisions of a rollout are the words of its text, as many as there are; its codes come
    after them.
    """

    def __init__(
        self,
        scorer: CodeScorer,
        tokenizer: Any,
        drawing: CodeDrawing,
        *,
        max_prompt_length: int,
        temperature: Schedule,
        evaluation_temperature: float,
        reasoning_length: int = 0,
    ) -> None:
        self.module, self.tokenizer, self.writer, self.drawing = scorer, tokenizer, scorer.writer, drawing
        self.max_prompt_length, self.temperature = max_prompt_length, temperature
        self.evaluation_temperature, self.reasoning_length = evaluation_temperature, reasoning_length
        self.in_step = False  # with other ranks, which make as many passes
        self.module.eval()  # dropout would make replay differ from sampling
        self._recompute(True)

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @property
    def max_decisions(self) -> int:
        return self.reasoning_length + self.writer.places

    def _recompute(self, on: bool) -> None:
        """Layers recompute their activations only in training mode, and then ignore the cache of keys and values."""
        for layer in self.module.modules():
            if isinstance(layer, GradientCheckpointingLayer):
                layer.training = on

    # --- prompts to pictures ---

    def encode(self, text: str) -> Tensor:
        """[token] int64. Raises UserError for a text that is too long, or nothing to the tokenizer."""
        if self.tokenizer.chat_template is not None:
            said = [{"role": "user", "content": self.writer.content(text)}]
            ids = self.tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=False)
        else:
            ids = self.tokenizer(text).input_ids
        if not 0 < len(ids) <= self.max_prompt_length:
            raise UserError(
                f"prompt {text!r} has {len(ids)} tokens; rollout.max_prompt_length={self.max_prompt_length}, and at "
                "least one is needed"
            )
        return torch.tensor(ids)

    def rollout(self, prompts: Sequence[Prompt], group_size: int, seeds: Sequence[int], *, step: int = 0) -> Rollouts:
        """`group_size` pictures a prompt. seeds: one a rollout, prompt by prompt."""
        each = [prompt for prompt in prompts for _ in range(group_size)]
        return self._rollouts(each, self._draw(each, seeds, self.temperature.value, self.drawing.guidance), group_size)

    def respond(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Sample]:
        """One picture a prompt, at the temperature and with the guidance of evaluation."""
        told = self.drawing.evaluation_guidance
        guidance = self.drawing.guidance if told is None else told
        return self._rollouts(
            list(prompts), self._draw(prompts, seeds, self.evaluation_temperature, guidance), 1
        ).samples

    def demonstrate(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> Rollouts:
        """The pictures that prompts carry in metadata["target"], as codes; some of them without their prompt. Text
        before them is what they carry in metadata["reasoning"]."""
        assert isinstance(self.drawing, CodeDemonstrations)
        for key, what in (("target", "picture"), ("reasoning", "text")):
            missing = next((p.id for p in prompts if key not in p.metadata), None)
            if missing is not None and (key == "target" or self.reasoning_length):
                raise UserError(f"prompt {missing} has no {what} to learn from: metadata[{key!r}] is missing")
        tokens = self.writer.tokens(self.module.model, torch.stack([p.metadata["target"] for p in prompts]))
        records = []
        for prompt, seed, picture in zip(prompts, seeds, tokens, strict=True):
            dropped = torch.rand((), generator=torch.Generator().manual_seed(int(seed))) < self.drawing.prompt_dropout
            told = self.encode(self.drawing.negative_prompt if dropped else self._asked(prompt))
            text = self._shown(prompt) if self.reasoning_length else NOTHING
            records.append(CodeRecord(told, picture, self.temperature.value, text))
        return self._rollouts(list(prompts), records, 1)

    def _shown(self, prompt: Prompt) -> Tensor:
        """[word] the text that a prompt carries, and the end token."""
        ids = self.tokenizer(prompt.metadata["reasoning"], add_special_tokens=False).input_ids
        if len(ids) >= self.reasoning_length:
            raise UserError(
                f"the text of prompt {prompt.id} has {len(ids)} tokens and its end; rollout.reasoning_length="
                f"{self.reasoning_length}"
            )
        if impossible := [i for i in ids if not self.module.allowed[i]]:
            raise UserError(
                f"the text of prompt {prompt.id} holds {self.tokenizer.decode(impossible)}, which the policy never "
                "writes"
            )
        return torch.tensor([*ids, self.tokenizer.eos_token_id])

    @torch.no_grad()
    def _draw(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], temperature: float, guidance: float
    ) -> list[CodeRecord]:
        """One picture a prompt, from its seed alone. temperature: 0 for the most likely token each time."""
        self._recompute(False)
        told = [self._read(prompt) for prompt in prompts]
        texts = self._write(told, seeds, temperature) if self.reasoning_length else [NOTHING] * len(told)
        generators = [torch.Generator(self.device).manual_seed(int(seed)) for seed in seeds]
        ids, there = self._collate(self._guided(self._before(told, texts), guidance))
        cache, written = DynamicCache(), []
        for _ in range(self.writer.places):
            hidden = self.module.hidden(ids, there, past_key_values=cache, use_cache=True)
            logits = self.module.logits(hidden[:, -1:], guidance)[:, 0] / (temperature or 1.0)
            code = (draw(logits, generators) if temperature else logits).argmax(-1) + self.writer.first
            written.append(code.cpu())
            ids = code[:, None] if guidance == 1 else code.repeat(2)[:, None]
            there = torch.cat([there, torch.ones_like(ids, dtype=torch.bool)], 1)
        tokens = torch.stack(written, 1)
        self._recompute(True)
        return [CodeRecord(prompt, tokens[i], temperature or 1.0, texts[i]) for i, prompt in enumerate(told)]

    def _write(self, told: list[Tensor], seeds: Sequence[int], temperature: float) -> list[Tensor]:
        """The text before codes, [word] each: up to its end token, or as long as it may be."""
        generators = [torch.Generator(self.device).manual_seed(mixed(int(seed), TEXTS) % 2**63) for seed in seeds]
        ids, there = self._collate(told)
        cache, end = DynamicCache(), self.tokenizer.eos_token_id
        written = torch.zeros(len(told), 0, dtype=torch.long)
        for _ in range(self.reasoning_length):
            hidden = self.module.hidden(ids, there, past_key_values=cache, use_cache=True)
            logits = self.module.words(hidden[:, -1]) / (temperature or 1.0)
            word = (draw(logits, generators) if temperature else logits).argmax(-1)
            written = torch.cat([written, word.cpu()[:, None]], 1)
            if not self.in_step and bool((written == end).any(1).all()):
                break
            ids = word[:, None]
            there = torch.cat([there, torch.ones_like(ids, dtype=torch.bool)], 1)
        ended = (written == end).long()
        return [row[kept] for row, kept in zip(written, ended.cumsum(1) - ended == 0, strict=True)]

    def _asked(self, prompt: Prompt) -> str:
        return self.drawing.template.replace("{}", prompt.text)

    def _read(self, prompt: Prompt) -> Tensor:
        if prompt.images or prompt.videos or prompt.messages:
            raise UserError(f"prompt {prompt.id}: model.type=picture_codes reads a single text without pictures")
        return self.encode(self._asked(prompt))

    def _before(self, prompts: Sequence[Tensor], texts: Sequence[Tensor]) -> list[Tensor]:
        """What stands before the codes of each row."""
        between = torch.tensor(self.writer.between, dtype=torch.long)
        return [torch.cat([prompt, text, between]) for prompt, text in zip(prompts, texts, strict=True)]

    def _guided(self, rows: list[Tensor], guidance: float, after: Sequence[Tensor] = ()) -> list[Tensor]:
        """Rows, and behind them as many unconditional ones where there is guidance; each has its row of `after` behind
        it."""
        if guidance != 1:
            negative = self.encode(self.drawing.negative_prompt)
            rows = [*rows, *(self.writer.unconditional(negative, row, self.tokenizer) for row in rows)]
        return [torch.cat([row, after[i % len(after)]]) for i, row in enumerate(rows)] if after else rows

    def _collate(self, rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Tokens [row, token], padded in front, and where there is any."""
        width = max(map(len, rows))
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        there = torch.zeros(len(rows), width, dtype=torch.bool)
        for i, row in enumerate(rows):
            ids[i, width - len(row) :], there[i, width - len(row) :] = row, True
        return ids.to(self.device), there.to(self.device)

    def _rollouts(self, prompts: list[Prompt], records: list[CodeRecord], group_size: int) -> Rollouts:
        pictures = self.writer.pictures(self.module.model, torch.stack([record.tokens for record in records]))
        samples = [self._sample(*row) for row in zip(prompts, records, pictures, strict=True)]
        lengths = torch.tensor([len(record.text) for record in records])
        place = torch.arange(self.max_decisions)
        mask = (place >= self.reasoning_length) | (place < lengths[:, None])
        made = Rollouts(samples, records, torch.arange(len(records)) // group_size, mask)
        if self.reasoning_length:
            made.extras[PARTS] = DecisionColumn(
                text_and_picture(len(records), self.reasoning_length, self.max_decisions)
            )
        return made

    def _sample(self, prompt: Prompt, record: CodeRecord, picture: Tensor) -> Sample:
        if not self.reasoning_length:
            return Sample(prompt, image=picture)
        return Sample(
            prompt,
            image=picture,
            response=self.tokenizer.decode(record.text, skip_special_tokens=True),
            response_length=len(record.text),
            truncated=int(record.text[-1]) != self.tokenizer.eos_token_id,
            max_response_length=self.reasoning_length,
        )

    # --- pictures to likelihoods ---

    def replay(self, rollouts: Rollouts, model: Any, *, reference: bool = False) -> Replay:
        """What `model` (`self.module` or the engine around it) says of every code, under the guidance of rollouts, and
        of every word before them, which has none; one forward for all, whose unconditional half has its gradient too.
        Demonstrations are scored without guidance."""
        records: list[CodeRecord] = rollouts.inputs
        guidance = 1.0 if isinstance(self.drawing, CodeDemonstrations) else self.drawing.guidance
        tokens = torch.stack([record.tokens for record in records])
        told = self._before([record.prompt for record in records], [record.text for record in records])
        ids, there = self._collate(self._guided(told, guidance, [row[:-1] for row in tokens]))
        text, before = self._words(records, ids.shape[1])
        heat = torch.tensor([record.temperature for record in records], device=self.device)
        logp, entropy, square_sum = model(ids, there, tokens.to(self.device), heat, guidance, text, before)
        segments = (
            text_and_picture(len(records), self.reasoning_length, self.max_decisions).to(self.device)
            if self.reasoning_length
            else None
        )
        return Replay(logp, entropy, square_sum, segments=segments)

    def _words(self, records: list[CodeRecord], width: int) -> tuple[Tensor, Tensor]:
        """The words of each row, and behind which place of the row each stands, [row, word]; where a text is shorter,
        the end token behind some place. width: of the rows."""
        rest = len(self.writer.between) + self.writer.places - 1
        text = torch.full((len(records), self.reasoning_length), self.tokenizer.eos_token_id or 0)
        first = torch.tensor([width - rest - len(record.text) for record in records])[:, None]
        for i, record in enumerate(records):
            text[i, : len(record.text)] = record.text
        before = (first + torch.arange(self.reasoning_length) - 1).clamp(max=width - 1)
        return text.to(self.device), before.to(self.device)

    @torch.no_grad()
    def inverse(self, rollouts: Rollouts) -> Tensor:
        """[rollout] the mean log-likelihood of the words of each prompt behind its picture and the question, without
        temperature. Raises UserError for a prompt without words."""
        records: list[CodeRecord] = rollouts.inputs
        question = torch.tensor(self._ids(self.drawing.question), dtype=torch.long)
        words = [torch.tensor(self._ids(sample.prompt.text), dtype=torch.long) for sample in rollouts.samples]
        if missing := [s.prompt.id for s, told in zip(rollouts.samples, words, strict=True) if not len(told)]:
            raise UserError(f"prompt {missing[0]} has no words, whose likelihood inverse_likelihood asks for")
        seen = [self.writer.seen(record.tokens, self.tokenizer) for record in records]
        ids, there = self._collate([torch.cat([a, question, b]) for a, b in zip(seen, words, strict=True)])
        pictures = torch.stack([s.image for s in rollouts.samples if s.image is not None]).to(self.device)
        place = {"position_ids": positions(there), "use_cache": False}
        self._recompute(False)
        hidden = self.writer.reads(self.module.model, ids, there.long(), pictures, **place)
        self._recompute(True)
        found = []
        for i, told in enumerate(words):
            logp = self.module.words(hidden[i, -len(told) - 1 : -1]).log_softmax(-1)
            found.append(logp.gather(-1, told.to(self.device)[:, None]).mean())
        return torch.stack(found).cpu()

    def _ids(self, text: str) -> list[int]:
        found: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return found

    def view(self, rollouts: Rollouts, change: Callable[[Prompt], Prompt]) -> Rollouts:
        """The same pictures under changed prompts."""
        inputs = [
            replace(record, prompt=self._read(change(sample.prompt)))
            for sample, record in zip(rollouts.samples, rollouts.inputs, strict=True)
        ]
        return replace(rollouts, inputs=inputs)

    def numbers(self, rollouts: Rollouts) -> Tensor:
        """[rollout, decision] int64, which token was written; -1 where there was none."""
        records: list[CodeRecord] = rollouts.inputs
        text, _ = self._words(records, 10**6)
        return torch.cat([text.cpu(), torch.stack([r.tokens for r in records])], 1).where(rollouts.mask, -1)

    # --- the rest of a policy ---

    def trained_by(self, engine: Any) -> None:
        """Under ZeRO-3 texts are written to their limit, so that every rank makes as many passes."""
        self.in_step = engine.zero_stage == 3

    def counts(self) -> dict[str, float]:
        return {}

    def save(self, folder: Path, state: dict[str, Tensor]) -> None:
        """Write model (or adapter) and tokenizer in transformers' own format, and what belongs to the codes. state: of
        `self.module`."""
        weights = {name.removeprefix("model."): value for name, value in state.items()}
        model: Any = self.module.model
        model.save_pretrained(folder, state_dict=weights)
        self.tokenizer.save_pretrained(folder)
        self.writer.save(folder)
        share(folder)


NOTHING = torch.zeros(0, dtype=torch.long)


def positions(there: Tensor) -> Tensor:
    """[row, token] the place of each token behind the padding."""
    return (there.long().cumsum(1) - 1).clamp(min=0)

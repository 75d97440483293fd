"""Language models that write pictures as codes, as policies: one decision a code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from mmrl.controls import Control
from mmrl.errors import UserError
from mmrl.files import share
from mmrl.generation.sampling import draw
from mmrl.kernels import token_logprob
from mmrl.policies import codebook
from mmrl.policies.codebook import Codebook
from mmrl.policies.codes.settings import CodeDemonstrations, CodeDrawing
from mmrl.rollouts import Prompt, Replay, Rollouts, Sample


@dataclass(frozen=True)
class CodeRecord:
    """A prompt and the picture that was written, on the CPU."""

    prompt: Tensor  # [token] int64
    tokens: Tensor  # [place] int64
    temperature: float


class CodeScorer(nn.Module):
    """What a model says of codes; this is the module that the engine wraps."""

    def __init__(self, model: nn.Module, first: int, count: int) -> None:
        """first, count: the tokens that are codes; no others are ever written."""
        super().__init__()
        self.model, self.first, self.count = model, first, count

    def logits(self, hidden: Tensor, guidance: float) -> Tensor:
        """[row, place, code] fp32 of the model's logits [row, place, vocabulary]. With guidance the second half of the
        rows is unconditional, and u + guidance (c - u) is left."""
        found = hidden[..., self.first : self.first + self.count].float()
        if guidance == 1:
            return found
        told, untold = found.chunk(2)
        return untold + guidance * (told - untold)

    def forward(
        self, ids: Tensor, there: Tensor, tokens: Tensor, temperature: Tensor, guidance: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """logp, entropy and sum of squared probabilities, [row, place] fp32, of `tokens` [row, place]. ids, there:
        [row, token], padded in front, without the last code; twice as many rows with guidance. temperature: [row]."""
        found = self.model(input_ids=ids, attention_mask=there.long(), position_ids=positions(there), use_cache=False)
        logits = self.logits(found.logits[:, -tokens.shape[1] :], guidance) / temperature[:, None, None]
        scored = token_logprob(logits.flatten(0, 1), (tokens - self.first).flatten())
        logp, entropy, square_sum = (
            part.view(tokens.shape) for part in (scored.logp, scored.entropy, scored.square_sum)
        )
        return logp, entropy, square_sum


class CodePolicy:
    """Writes pictures code by code, and says how likely they were; guidance is the same in both."""

    def __init__(
        self,
        scorer: CodeScorer,
        tokenizer: Any,
        codes: Codebook,
        drawing: CodeDrawing,
        *,
        max_prompt_length: int,
        temperature: Control,
        evaluation_temperature: float,
    ) -> None:
        self.module, self.tokenizer, self.codebook, self.drawing = scorer, tokenizer, codes, drawing
        self.max_prompt_length, self.temperature = max_prompt_length, temperature
        self.evaluation_temperature = evaluation_temperature
        self.module.eval()  # dropout would make replay differ from sampling

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @property
    def max_decisions(self) -> int:
        return self.codebook.places

    # --- prompts to pictures ---

    def encode(self, text: str) -> Tensor:
        """[token] int64. Raises UserError for a text that is too long, or nothing to the tokenizer."""
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
        """The pictures that prompts carry in metadata["target"], as codes; some of them without their prompt."""
        assert isinstance(self.drawing, CodeDemonstrations)
        missing = next((p.id for p in prompts if "target" not in p.metadata), None)
        if missing is not None:
            raise UserError(f"prompt {missing} has no picture to learn from: metadata['target'] is missing")
        tokens = self.codebook.tokens(torch.stack([p.metadata["target"] for p in prompts]))
        records = []
        for prompt, seed, picture in zip(prompts, seeds, tokens, strict=True):
            dropped = torch.rand((), generator=torch.Generator().manual_seed(int(seed))) < self.drawing.prompt_dropout
            text = self.drawing.negative_prompt if dropped else prompt.text
            records.append(CodeRecord(self.encode(text), picture, self.temperature.value))
        return self._rollouts(list(prompts), records, 1)

    @torch.no_grad()
    def _draw(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], temperature: float, guidance: float
    ) -> list[CodeRecord]:
        """One picture a prompt, from its seed alone. temperature: 0 for the most likely code each time."""
        generators = [torch.Generator(self.device).manual_seed(int(seed)) for seed in seeds]
        told = [self._read(prompt) for prompt in prompts]
        ids, there = self._collate(self._guided(told, guidance))
        cache, written = DynamicCache(), []
        for _ in range(self.codebook.places):
            found = self.module.model(
                input_ids=ids,
                attention_mask=there.long(),
                position_ids=positions(there)[:, -ids.shape[1] :],
                past_key_values=cache,
                use_cache=True,
            )
            logits = self.module.logits(found.logits[:, -1:], guidance)[:, 0] / (temperature or 1.0)
            code = (draw(logits, generators) if temperature else logits).argmax(-1) + self.module.first
            written.append(code.cpu())
            ids = code[:, None] if guidance == 1 else code.repeat(2)[:, None]
            there = torch.cat([there, torch.ones_like(ids, dtype=torch.bool)], 1)
        tokens = torch.stack(written, 1)
        return [CodeRecord(prompt, tokens[i], temperature or 1.0) for i, prompt in enumerate(told)]

    def _read(self, prompt: Prompt) -> Tensor:
        if prompt.images or prompt.videos or prompt.messages:
            raise UserError(f"prompt {prompt.id}: model.type=picture_codes reads a single text without pictures")
        return self.encode(prompt.text)

    def _guided(self, rows: list[Tensor], guidance: float, after: Sequence[Tensor] = ()) -> list[Tensor]:
        """Prompts, and behind them as many negative ones where there is guidance; each has its row of `after` behind
        it."""
        rows = rows if guidance == 1 else [*rows, *[self.encode(self.drawing.negative_prompt)] * len(rows)]
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
        pictures = self.codebook.pictures(torch.stack([record.tokens for record in records]))
        samples = [Sample(prompt, image=picture) for prompt, picture in zip(prompts, pictures, strict=True)]
        mask = torch.ones(len(records), self.codebook.places, dtype=torch.bool)
        return Rollouts(samples, records, torch.arange(len(records)) // group_size, mask)

    # --- pictures to likelihoods ---

    def replay(self, rollouts: Rollouts, model: Any, *, reference: bool = False) -> Replay:
        """What `model` (`self.module` or the engine around it) says of every code, under the guidance of rollouts; one
        forward for all, whose unconditional half has its gradient too. Demonstrations are scored without guidance."""
        records: list[CodeRecord] = rollouts.inputs
        guidance = 1.0 if isinstance(self.drawing, CodeDemonstrations) else self.drawing.guidance
        tokens = torch.stack([record.tokens for record in records])
        rows = self._guided([record.prompt for record in records], guidance, [row[:-1] for row in tokens])
        ids, there = self._collate(rows)
        heat = torch.tensor([record.temperature for record in records], device=self.device)
        return Replay(*model(ids, there, tokens.to(self.device), heat, guidance))

    def view(self, rollouts: Rollouts, change: Callable[[Prompt], Prompt]) -> Rollouts:
        """The same pictures under changed prompts."""
        inputs = [
            replace(record, prompt=self._read(change(sample.prompt)))
            for sample, record in zip(rollouts.samples, rollouts.inputs, strict=True)
        ]
        return replace(rollouts, inputs=inputs)

    def numbers(self, rollouts: Rollouts) -> Tensor:
        """[rollout, decision] int64, which token was written."""
        return torch.stack([record.tokens for record in rollouts.inputs])

    # --- the rest of a policy ---

    def trained_by(self, engine: Any) -> None:
        """It has nothing to keep step with: every rank makes as many passes."""

    def counts(self) -> dict[str, float]:
        return {}

    def save(self, folder: Path, state: dict[str, Tensor]) -> None:
        """Write model (or adapter) and tokenizer in transformers' own format, and the codebook. state: of
        `self.module`."""
        weights = {name.removeprefix("model."): value for name, value in state.items()}
        model: Any = self.module.model
        model.save_pretrained(folder, state_dict=weights)
        self.tokenizer.save_pretrained(folder)
        codebook.write(folder, self.codebook)
        share(folder)


def positions(there: Tensor) -> Tensor:
    """[row, token] the place of each token behind the padding."""
    return (there.long().cumsum(1) - 1).clamp(min=0)

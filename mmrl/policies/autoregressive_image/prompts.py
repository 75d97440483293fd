"""Prompts, text and codes as rows of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmrl.errors import UserError
from mmrl.policies.autoregressive_image.scorer import CodeScorer
from mmrl.policies.autoregressive_image.settings import CodeDrawing
from mmrl.policies.tokenizers import Tokenizer
from mmrl.rollouts import Prompt

NOTHING = torch.zeros(0, dtype=torch.long)


@dataclass(frozen=True)
class CodeRecord:
    """A prompt, what was written about it and the image, on the CPU."""

    prompt: Tensor  # [token] int64
    tokens: Tensor  # [place] int64
    temperature: float
    text: Tensor  # [word] int64, before the codes; its end token too, where it has one


class CodePrompts:
    """Prompts to tokens, and tokens to what the model reads. reasoning_length: of the longest text before codes."""

    def __init__(
        self,
        scorer: CodeScorer,
        tokenizer: Tokenizer,
        drawing: CodeDrawing,
        *,
        max_prompt_length: int,
        reasoning_length: int,
    ) -> None:
        self.scorer, self.writer, self.tokenizer, self.drawing = scorer, scorer.writer, tokenizer, drawing
        self.max_prompt_length, self.reasoning_length = max_prompt_length, reasoning_length

    @property
    def device(self) -> torch.device:
        return next(self.scorer.parameters()).device

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

    def asked(self, prompt: Prompt) -> str:
        """What is asked of a prompt."""
        return self.drawing.template.replace("{}", prompt.text)

    def read(self, prompt: Prompt) -> Tensor:
        """[token]. Raises UserError as `encode`, and for images."""
        if prompt.images or prompt.videos or prompt.messages:
            raise UserError(f"prompt {prompt.id}: model.type=autoregressive_image reads a single text without images")
        return self.encode(self.asked(prompt))

    def demonstrated(self, prompt: Prompt) -> Tensor:
        """[word] the text that a prompt carries, and the end token."""
        ids = self.ids(prompt.metadata["reasoning"])
        if len(ids) >= self.reasoning_length:
            raise UserError(
                f"the text of prompt {prompt.id} has {len(ids)} tokens and its end; rollout.reasoning_length="
                f"{self.reasoning_length}"
            )
        if impossible := [i for i in ids if not self.scorer.allowed[i]]:
            raise UserError(
                f"the text of prompt {prompt.id} holds {self.tokenizer.decode(impossible)}, which the policy never "
                "writes"
            )
        return torch.tensor([*ids, self.tokenizer.eos_token_id])

    def ids(self, text: str) -> list[int]:
        """Tokens of a text inside a prompt."""
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def before(self, prompts: Sequence[Tensor], texts: Sequence[Tensor]) -> list[Tensor]:
        """What stands before the codes of each row."""
        between = torch.tensor(self.writer.between, dtype=torch.long)
        return [torch.cat([prompt, text, between]) for prompt, text in zip(prompts, texts, strict=True)]

    def guided(self, rows: list[Tensor], guidance: float, after: Sequence[Tensor] = ()) -> list[Tensor]:
        """Rows, and behind them as many unconditional ones where there is guidance; each has its row of `after` behind
        it."""
        if guidance != 1:
            negative = self.encode(self.drawing.negative_prompt)
            rows = [*rows, *(self.writer.unconditional(negative, row, self.tokenizer) for row in rows)]
        return [torch.cat([row, after[i % len(after)]]) for i, row in enumerate(rows)] if after else rows

    def collate(self, rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Tokens [row, token], padded in front, and where there is any."""
        width = max(map(len, rows))
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        there = torch.zeros(len(rows), width, dtype=torch.bool)
        for i, row in enumerate(rows):
            ids[i, width - len(row) :], there[i, width - len(row) :] = row, True
        return ids.to(self.device), there.to(self.device)

    def words(self, records: list[CodeRecord], width: int) -> tuple[Tensor, Tensor]:
        """The words of each row, and behind which place of the row each stands, [row, word]; where a text is shorter,
        the end token behind some place. width: of the rows."""
        rest = len(self.writer.between) + self.writer.places - 1
        text = torch.full((len(records), self.reasoning_length), self.tokenizer.eos_token_id or 0)
        first = torch.tensor([width - rest - len(record.text) for record in records])[:, None]
        for i, record in enumerate(records):
            text[i, : len(record.text)] = record.text
        before = (first + torch.arange(self.reasoning_length) - 1).clamp(max=width - 1)
        return text.to(self.device), before.to(self.device)

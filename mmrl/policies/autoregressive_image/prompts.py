"""Prompts, text and image tokens as rows of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmrl.errors import UserError
from mmrl.policies.autoregressive_image.scorer import ImageTokenScorer
from mmrl.policies.autoregressive_image.settings import ImageTokenDrawing
from mmrl.policies.tokenizers import Tokenizer
from mmrl.rollouts import Prompt
from mmrl.runtime.template_limits import render_template

NO_TEXT = torch.zeros(0, dtype=torch.long)


@dataclass(frozen=True)
class ImageTokenRecord:
    """One rollout on the CPU: the prompt, the text written about it, and the image."""

    prompt: Tensor  # [token] int64
    tokens: Tensor  # [position] int64, the image
    temperature: float
    text: Tensor  # [text token] int64, before the image; its end token too, where it has one


class ImageTokenPrompts:
    """Turns prompts into tokens, and tokens into model inputs. reasoning_length: the longest text before an image."""

    def __init__(
        self,
        scorer: ImageTokenScorer,
        tokenizer: Tokenizer,
        drawing: ImageTokenDrawing,
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
        """Returns the tokens of a request, [token] int64. Raises UserError for a string that is too long, or that has
        no tokens."""
        if self.tokenizer.chat_template is not None:
            messages = [{"role": "user", "content": self.writer.content(text)}]
            rendered = render_template(
                f"model.path={self.tokenizer.name_or_path}", self.tokenizer.apply_chat_template, messages
            )
            ids = self.tokenizer(rendered, add_special_tokens=False).input_ids
        else:
            ids = self.tokenizer(text).input_ids
        if not 0 < len(ids) <= self.max_prompt_length:
            raise UserError(
                f"prompt {text!r} has {len(ids)} tokens; rollout.max_prompt_length={self.max_prompt_length}, and at "
                "least one is needed"
            )
        return torch.tensor(ids)

    def request(self, prompt: Prompt) -> str:
        """Returns the request for an image: the template, filled with the prompt's text."""
        return self.drawing.template.replace("{}", prompt.text)

    def read(self, prompt: Prompt) -> Tensor:
        """Returns the tokens of a prompt, [token]. Raises UserError as `encode`, and for a prompt with images."""
        if prompt.images or prompt.videos or prompt.messages:
            raise UserError(f"prompt {prompt.id}: model.type=autoregressive_image reads a single text without images")
        return self.encode(self.request(prompt))

    def reasoning(self, prompt: Prompt) -> Tensor:
        """Returns the text that a prompt carries, and the end token, [text token]."""
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
        """Returns the tokens of a string inside a prompt."""
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def prefixes(self, prompts: Sequence[Tensor], texts: Sequence[Tensor]) -> list[Tensor]:
        """Returns the tokens before the image tokens of each row."""
        between = torch.tensor(self.writer.between, dtype=torch.long)
        return [torch.cat([prompt, text, between]) for prompt, text in zip(prompts, texts, strict=True)]

    def with_unconditional(self, rows: list[Tensor], guidance: float, after: Sequence[Tensor] = ()) -> list[Tensor]:
        """Returns rows, and behind them as many unconditional ones where there is guidance; each is followed by its row
        of `after`."""
        if guidance != 1:
            negative = self.encode(self.drawing.negative_prompt)
            rows = [*rows, *(self.writer.unconditional(negative, row, self.tokenizer) for row in rows)]
        return [torch.cat([row, after[i % len(after)]]) for i, row in enumerate(rows)] if after else rows

    def collate(self, rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Returns tokens, padded in front, and their attention mask, [row, token] each."""
        width = max(map(len, rows))
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        mask = torch.zeros(len(rows), width, dtype=torch.bool)
        for i, row in enumerate(rows):
            ids[i, width - len(row) :], mask[i, width - len(row) :] = row, True
        return ids.to(self.device), mask.to(self.device)

    def text_targets(self, records: list[ImageTokenRecord], width: int) -> tuple[Tensor, Tensor]:
        """Returns the text tokens of each row, and the columns whose hidden states predict them, [row, text token]
        each; behind a shorter text stand end tokens with any columns. width: of the rows."""
        rest = len(self.writer.between) + self.writer.tokens_per_image - 1
        text = torch.full((len(records), self.reasoning_length), self.tokenizer.eos_token_id or 0)
        first = torch.tensor([width - rest - len(record.text) for record in records])[:, None]
        for i, record in enumerate(records):
            text[i, : len(record.text)] = record.text
        columns = (first + torch.arange(self.reasoning_length) - 1).clamp(max=width - 1)
        return text.to(self.device), columns.to(self.device)

"""Encodes prompts, and builds batches of prompts, texts and image tokens."""

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
    """The tokens of one rollout, on the CPU: prompt, text and image."""

    prompt: Tensor  # [token] int64
    tokens: Tensor  # [image token] int64
    temperature: float  # of its log-probabilities
    text: Tensor  # [text token] int64, the text before the image, with its end token if it has ended


class ImageTokenPrompts:
    """Encodes prompts as tokens, and builds model inputs from tokens."""

    def __init__(
        self,
        scorer: ImageTokenScorer,
        tokenizer: Tokenizer,
        drawing: ImageTokenDrawing,
        *,
        max_prompt_length: int,
        reasoning_length: int,
    ) -> None:
        """max_prompt_length, reasoning_length: maximum tokens of a prompt, and of the text before an image."""
        self.scorer, self.writer, self.tokenizer, self.drawing = scorer, scorer.writer, tokenizer, drawing
        self.max_prompt_length, self.reasoning_length = max_prompt_length, reasoning_length

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return next(self.scorer.parameters()).device

    def encode(self, text: str) -> Tensor:
        """Returns the token ids of a text as a user message, [token] int64. Raises UserError if it has too many tokens,
        or none."""
        if self.tokenizer.chat_template is not None:
            messages = [{"role": "user", "content": self.writer.content(text)}]
            rendered = render_template(f"model.path={self.tokenizer.name_or_path}", self.tokenizer, messages)
            ids = self.tokenizer(rendered, add_special_tokens=False).input_ids
        else:
            ids = self.tokenizer(text).input_ids
        if not 0 < len(ids) <= self.max_prompt_length:
            raise UserError(
                f"prompt {text!r} has {len(ids)} tokens, but needs from 1 to rollout.max_prompt_length="
                f"{self.max_prompt_length}; change the prompt or that key"
            )
        return torch.tensor(ids)

    def request(self, prompt: Prompt) -> str:
        """Returns the text of the user message: `drawing.template` with the prompt's text in place of {}."""
        return self.drawing.template.replace("{}", prompt.text)

    def encode_prompt(self, prompt: Prompt) -> Tensor:
        """Returns the token ids of a prompt, [token]. Raises UserError as `encode` does, and for a prompt with
        images."""
        if prompt.images or prompt.videos or prompt.messages:
            raise UserError(
                f"prompt {prompt.id} has images, videos or several messages, which model.type=autoregressive_image "
                "does not read; give it a single text"
            )
        return self.encode(self.request(prompt))

    def reasoning(self, prompt: Prompt) -> Tensor:
        """Returns the token ids of metadata["reasoning"] of a prompt and an end token, [text token]. Raises UserError
        if it is too long or has tokens that the policy never samples."""
        ids = self.ids(prompt.metadata["reasoning"])
        if len(ids) >= self.reasoning_length:
            raise UserError(
                f"metadata['reasoning'] of prompt {prompt.id} has {len(ids)} tokens and an end token, more than "
                f"rollout.reasoning_length={self.reasoning_length}; raise it, or shorten the text"
            )
        if never_sampled := [i for i in ids if not self.scorer.allowed[i]]:
            raise UserError(
                f"metadata['reasoning'] of prompt {prompt.id} holds {self.tokenizer.decode(never_sampled)}, a special "
                "token that the policy never samples; remove it from the text"
            )
        return torch.tensor([*ids, self.tokenizer.eos_token_id])

    def ids(self, text: str) -> list[int]:
        """Returns the token ids of a text, without special tokens."""
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def prefixes(self, prompts: Sequence[Tensor], texts: Sequence[Tensor]) -> list[Tensor]:
        """Returns the tokens before the image tokens of each row: prompt, text, and the begin-of-image token if any."""
        between = torch.tensor(self.writer.between, dtype=torch.long)
        return [torch.cat([prompt, text, between]) for prompt, text in zip(prompts, texts, strict=True)]

    def with_unconditional(self, rows: list[Tensor], guidance: float, after: Sequence[Tensor] = ()) -> list[Tensor]:
        """Returns the rows and, if guidance is not 1, then an unconditional row for each, with the negative prompt.
        after: tokens that are appended to each row and to its unconditional row."""
        if guidance != 1:
            negative = self.encode(self.drawing.negative_prompt)
            rows = [*rows, *(self.writer.unconditional(negative, row, self.tokenizer) for row in rows)]
        # modulo: row i and its unconditional row, i + len(after), get the same tokens
        return [torch.cat([row, after[i % len(after)]]) for i, row in enumerate(rows)] if after else rows

    def collate(self, rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Returns token ids, padded on the left, and their attention mask, [row, token] each."""
        width = max(map(len, rows))
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        mask = torch.zeros(len(rows), width, dtype=torch.bool)
        for i, row in enumerate(rows):
            ids[i, width - len(row) :], mask[i, width - len(row) :] = row, True
        return ids.to(self.device), mask.to(self.device)

    def text_targets(self, records: list[ImageTokenRecord], width: int) -> tuple[Tensor, Tensor]:
        """Returns the text tokens of each row, and the columns whose hidden states predict them, [row, text token]
        each.

        Shorter texts are padded with end tokens, whose columns are arbitrary: they are masked in rollouts. width:
        tokens of a row, padding included.
        """
        # the tokens after the text in a row, without the last image token, from which no token is predicted
        tokens_after = len(self.writer.between) + self.writer.tokens_per_image - 1
        # without texts the tokenizer may lack an end token (`or 0`); `text` then has no columns
        text = torch.full((len(records), self.reasoning_length), self.tokenizer.eos_token_id or 0)
        text_start = torch.tensor([width - tokens_after - len(record.text) for record in records])[:, None]
        for i, record in enumerate(records):
            text[i, : len(record.text)] = record.text
        columns = (text_start + torch.arange(self.reasoning_length) - 1).clamp(max=width - 1)
        return text.to(self.device), columns.to(self.device)

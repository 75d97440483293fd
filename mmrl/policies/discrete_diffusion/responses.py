"""Layout of responses: text up to an end token, the tokens of an image, or one after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mmrl.errors import UserError
from mmrl.policies.codebook import Codebook
from mmrl.policies.discrete_diffusion.scorer import Vocabulary
from mmrl.policies.tokenizers import Tokenizer
from mmrl.rollouts import PARTS, DecisionColumn, Prompt, Rollouts, Sample, text_image_parts
from mmrl.runtime.template_limits import render_template


@dataclass(frozen=True)
class MaskedRecord:
    """A prompt and its response, on the CPU."""

    prompt: Tensor  # [token] int64
    response: Tensor  # [position] int64
    steps: Tensor  # [position] int64, the step in which a position was filled; 0 for demonstrations
    seed: int  # of the states in which it is scored
    temperature: float


class ResponseLayout:
    """Turns prompts into tokens, and the positions of responses into texts and images."""

    def __init__(
        self,
        kind: str,
        tokenizer: Tokenizer,
        vocabulary: Vocabulary,
        *,
        length: int,
        max_prompt_length: int,
        codebook: Codebook | None = None,
        reasoning_length: int = 0,
    ) -> None:
        """kind: `model.type`. length: positions of a response. codebook: of a model that writes images; None: it writes
        text. reasoning_length: how many positions of a model that writes images are text before the image."""
        self.kind, self.tokenizer, self.vocabulary = kind, tokenizer, vocabulary
        self.length, self.codebook, self.max_prompt_length = length, codebook, max_prompt_length
        self.text_length = length if codebook is None else reasoning_length  # positions of text; image tokens follow

    @property
    def in_parts(self) -> bool:
        """Returns whether a response has text and image tokens."""
        return 0 < self.text_length < self.length

    def image_mask(self, position: Tensor) -> Tensor | None:
        """Returns which of the positions [n] hold image tokens, [n] bool; None where all are of one kind."""
        return position >= self.text_length if self.in_parts else None

    def encode(self, prompt: Prompt) -> Tensor:
        """Returns the tokens of a prompt, [token] int64. Raises UserError for images, and for a prompt that is too
        long."""
        if prompt.images or prompt.videos or prompt.messages:
            raise UserError(f"prompt {prompt.id}: model.type={self.kind} reads a single text without images")
        if self.tokenizer.chat_template is not None:
            messages = [{"role": "system", "content": prompt.system}] if prompt.system else []
            messages.append({"role": "user", "content": prompt.text})
            rendered = render_template(
                f"model.path={self.tokenizer.name_or_path}", self.tokenizer.apply_chat_template, messages
            )
            ids = self.tokenizer(rendered, add_special_tokens=False).input_ids
        else:
            ids = self.tokenizer(f"{prompt.system or ''}{prompt.text}", add_special_tokens=False).input_ids
        if not 0 < len(ids) <= self.max_prompt_length:
            raise UserError(
                f"prompt {prompt.id} has {len(ids)} tokens; rollout.max_prompt_length={self.max_prompt_length}, and at "
                "least one is needed"
            )
        return torch.tensor(ids)

    def demonstration(self, prompt: Prompt) -> Tensor:
        """Returns the response that a prompt carries, [position]. Raises UserError where there is none, or one that the
        policy could not give."""
        if self.codebook is None:
            return self._text_tokens(
                prompt, str(prompt.metadata.get("demonstration", prompt.answer)), "response_length"
            )
        for key, kind in (("target", "image"), ("reasoning", "text")):
            if key not in prompt.metadata and (key == "target" or self.text_length):
                raise UserError(f"prompt {prompt.id} has no {kind} to learn from: metadata[{key!r}] is missing")
        image_tokens = self.codebook.encode(prompt.metadata["target"][None])[0]
        if not self.text_length:
            return image_tokens
        return torch.cat(
            [self._text_tokens(prompt, str(prompt.metadata["reasoning"]), "reasoning_length"), image_tokens]
        )

    def _text_tokens(self, prompt: Prompt, text: str, limit: str) -> Tensor:
        """Returns a string filled up with end tokens, [position]. limit: the key of its length."""
        end = self.vocabulary.end
        assert end is not None
        ids = self.tokenizer(text, add_special_tokens=False).input_ids
        if len(ids) > self.text_length:
            raise UserError(
                f"the demonstration of prompt {prompt.id} has {len(ids)} tokens, more than "
                f"rollout.{limit}={self.text_length}"
            )
        if impossible := set(ids) & set(self.vocabulary.suppressed.tolist()):
            raise UserError(
                f"the demonstration of prompt {prompt.id} holds {self.tokenizer.decode(list(impossible))}, which the "
                "policy never writes"
            )
        return torch.tensor(ids + [end] * (self.text_length - len(ids)))

    def rollouts(
        self,
        prompts: list[Prompt],
        records: list[MaskedRecord],
        group_size: int,
        forwards: Callable[[MaskedRecord], int],
    ) -> Rollouts:
        """Builds rollouts of records. forwards: returns how many forwards a response took."""
        responses = torch.stack([record.response for record in records])
        mask = torch.ones_like(responses, dtype=torch.bool)
        if self.vocabulary.end is not None:
            ends = (responses[:, : self.text_length] == self.vocabulary.end).long()
            mask[:, : self.text_length] = ends.cumsum(1) - ends == 0  # up to the first end token, and it too
        samples = [self.sample(*row, forwards) for row in zip(prompts, records, mask, strict=True)]
        rollouts = Rollouts(samples, records, torch.arange(len(records)) // group_size, mask)
        if self.in_parts:
            rollouts.extras[PARTS] = DecisionColumn(text_image_parts(len(records), self.text_length, self.length))
        return rollouts

    def units(self, rollouts: Rollouts) -> dict[str, int]:
        """Returns the tokens of prompts and responses, those of responses up to their ends, and images."""
        tokens = sum(len(record.prompt) + len(record.response) for record in rollouts.inputs)
        images = {} if self.codebook is None else {"images": len(rollouts)}
        return {"tokens": tokens, "response_tokens": sum(int(mask.sum()) for mask in rollouts.mask), **images}

    def sample(
        self, prompt: Prompt, record: MaskedRecord, mask: Tensor, forwards: Callable[[MaskedRecord], int]
    ) -> Sample:
        """Builds the sample of one record. mask: [position] which positions count."""
        image = None
        if self.codebook is not None:
            image = self.codebook.decode(record.response[None, self.text_length :])[0]
        if not self.text_length:
            return Sample(prompt, image=image)
        text = record.response[: self.text_length][mask[: self.text_length]]
        return Sample(
            prompt,
            image=image,
            response=self.tokenizer.decode(text, skip_special_tokens=True),
            response_length=len(text),
            truncated=self.vocabulary.end is not None and int(text[-1]) != self.vocabulary.end,
            max_response_length=self.text_length,
            forwards=forwards(record),
        )

"""The layout of responses: text up to an end token, the tokens of an image, or text followed by an image."""

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
    """A prompt and its response, on the CPU: all that replaying the response needs."""

    prompt: Tensor  # [token] int64
    response: Tensor  # [position] int64
    steps: Tensor  # [position] int64, the step in which a position was filled (the trace); 0 for demonstrations
    seed: int  # of the states in which the response is scored
    temperature: float  # of its log-probabilities


class ResponseLayout:
    """Encodes prompts as tokens, and decodes the tokens of responses to texts and images."""

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
        """kind: the value of `model.type`. length: tokens of a response. codebook: the image tokens of a model that
        generates images; None: it generates text. reasoning_length: number of text tokens before the image."""
        self.kind, self.tokenizer, self.vocabulary = kind, tokenizer, vocabulary
        self.length, self.codebook, self.max_prompt_length = length, codebook, max_prompt_length
        self.text_length = length if codebook is None else reasoning_length  # tokens of text; image tokens follow

    @property
    def has_text_and_image(self) -> bool:
        """True if a response has both text and image tokens."""
        return 0 < self.text_length < self.length

    def image_mask(self, position: Tensor) -> Tensor | None:
        """Returns which of the positions [n] hold image tokens, [n] bool; None if a response has only text or only
        image tokens."""
        return position >= self.text_length if self.has_text_and_image else None

    def encode(self, prompt: Prompt) -> Tensor:
        """Returns the token ids of a prompt, [token] int64. Raises UserError if it has images or several messages, or
        is too long."""
        if prompt.images or prompt.videos or prompt.messages:
            raise UserError(
                f"prompt {prompt.id} has images, videos or several messages, which model.type={self.kind} does not "
                "read; give it a single text"
            )
        if self.tokenizer.chat_template is not None:
            messages = [{"role": "system", "content": prompt.system}] if prompt.system else []
            messages.append({"role": "user", "content": prompt.text})
            rendered = render_template(f"model.path={self.tokenizer.name_or_path}", self.tokenizer, messages)
            ids = self.tokenizer(rendered, add_special_tokens=False).input_ids
        else:
            ids = self.tokenizer(f"{prompt.system or ''}{prompt.text}", add_special_tokens=False).input_ids
        if not 0 < len(ids) <= self.max_prompt_length:
            raise UserError(
                f"prompt {prompt.id} has {len(ids)} tokens, but needs from 1 to {self.max_prompt_length} (by "
                "rollout.max_prompt_length and the context of the model); change the prompt or that key"
            )
        return torch.tensor(ids)

    def demonstration(self, prompt: Prompt) -> Tensor:
        """Returns the token ids of a prompt's demonstrated response, [position]; see
        `DiscreteDiffusionPolicy.demonstrate`.

        Raises UserError if the prompt has no demonstration, or one that the policy could not sample.
        """
        if self.codebook is None:
            return self._text_tokens(
                prompt, str(prompt.metadata.get("demonstration", prompt.answer)), "response_length"
            )
        for key, kind in (("target", "image"), ("reasoning", "text")):
            if key not in prompt.metadata and (key == "target" or self.text_length):
                raise UserError(f"prompt {prompt.id} has no {kind} to learn from; set its metadata[{key!r}]")
        image_tokens = self.codebook.encode(prompt.metadata["target"][None])[0]
        if not self.text_length:
            return image_tokens
        return torch.cat(
            [self._text_tokens(prompt, str(prompt.metadata["reasoning"]), "reasoning_length"), image_tokens]
        )

    def _text_tokens(self, prompt: Prompt, text: str, limit: str) -> Tensor:
        """Returns the token ids of a text, padded with end tokens, [position]. limit: the key of rollout that sets the
        length, for messages."""
        end = self.vocabulary.end
        assert end is not None
        ids = self.tokenizer(text, add_special_tokens=False).input_ids
        if len(ids) > self.text_length:
            raise UserError(
                f"the demonstration of prompt {prompt.id} has {len(ids)} tokens, more than "
                f"rollout.{limit}={self.text_length}; raise it, or shorten the demonstration"
            )
        if never_sampled := set(ids) & set(self.vocabulary.suppressed.tolist()):
            raise UserError(
                f"the demonstration of prompt {prompt.id} holds {self.tokenizer.decode(list(never_sampled))}, a "
                "special token that the policy never samples; take it out"
            )
        return torch.tensor(ids + [end] * (self.text_length - len(ids)))

    def rollouts(
        self,
        prompts: list[Prompt],
        records: list[MaskedRecord],
        group_size: int,
        forwards: Callable[[MaskedRecord], int],
    ) -> Rollouts:
        """Builds rollouts of records, `group_size` per prompt.

        prompts: one per record. forwards: returns the number of forward passes that sampled a response.
        """
        responses = torch.stack([record.response for record in records])
        mask = torch.ones_like(responses, dtype=torch.bool)
        if self.vocabulary.end is not None:
            ends = (responses[:, : self.text_length] == self.vocabulary.end).long()
            mask[:, : self.text_length] = ends.cumsum(1) - ends == 0  # up to and including the first end token
        samples = [self.sample(*row, forwards) for row in zip(prompts, records, mask, strict=True)]
        rollouts = Rollouts(samples, records, torch.arange(len(records)) // group_size, mask)
        if self.has_text_and_image:
            rollouts.extras[PARTS] = DecisionColumn(text_image_parts(len(records), self.text_length, self.length))
        return rollouts

    def units(self, rollouts: Rollouts) -> dict[str, int]:
        """Returns counts by name: `tokens` of prompts and responses, `response_tokens` up to and including the end
        tokens, and `images` of a model that generates them."""
        tokens = sum(len(record.prompt) + len(record.response) for record in rollouts.inputs)
        images = {} if self.codebook is None else {"images": len(rollouts)}
        return {"tokens": tokens, "response_tokens": sum(int(mask.sum()) for mask in rollouts.mask), **images}

    def sample(
        self, prompt: Prompt, record: MaskedRecord, mask: Tensor, forwards: Callable[[MaskedRecord], int]
    ) -> Sample:
        """Returns the sample that rewards score, with the text of a record if there is one, and its image if there is
        one. mask: [position] bool, True up to and including the end token of the text."""
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

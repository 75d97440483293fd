"""Prompts to tokens, and tokens to rollouts, by the model's own processor."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from einops import rearrange
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from mmrl.errors import UserError
from mmrl.policies.tokenizers import Processor, Tokenizer
from mmrl.policies.vlm.prompts import RolloutTokens, encode
from mmrl.policies.vlm.responses.fitting import PromptEncoder
from mmrl.policies.vlm.responses.thoughts import opens_thoughts
from mmrl.protocols.parts import PromptReader
from mmrl.rollouts import Prompt, Rollouts, Sample
from mmrl.schedules.schedule import Schedule

# Keys of a model's configuration whose token stands for pixels and so can not be part of an answer.
PLACEHOLDER_KEYS = (
    "image_token_id",
    "image_token_index",
    "video_token_id",
    "video_token_index",
    "vision_start_token_id",
    "vision_end_token_id",
    "vision_token_id",
)


class ChatTokenizer:
    """Converts text and tokens, and knows the longest prompt and response."""

    def __init__(
        self, processor: Processor, model: PreTrainedModel, max_prompt_length: int, response_limit: Schedule
    ) -> None:
        self.processor, self.tokenizer = processor, processor.tokenizer
        self.eos = end_tokens(model.generation_config, self.tokenizer)
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token_id = self.eos[0]
        self.pad = self.tokenizer.pad_token_id
        self.suppressed = never_sampled(model, self.tokenizer, self.eos)
        self.max_prompt_length, self.response_limit = max_prompt_length, response_limit
        self.reader: PromptReader | None = None  # may have encoded prompts already
        self.encoder = PromptEncoder(processor, max_prompt_length, placeholders(model, self.tokenizer))

    @property
    def max_response_length(self) -> int:
        """Tokens of the longest response that is sampled now."""
        return int(self.response_limit.value)

    def encode(self, prompts: Sequence[Prompt]) -> list[RolloutTokens]:
        """Encodes prompts, with empty responses; see `mmrl.policies.vlm.prompts.encode`."""
        cached = [self._cached(prompt) for prompt in prompts]
        rest = [prompt for prompt, tokens in zip(prompts, cached, strict=True) if tokens is None]
        encoded = iter(encode(self.processor, rest, self.max_prompt_length))
        return [next(encoded) if tokens is None else tokens for tokens in cached]

    def _cached(self, prompt: Prompt) -> RolloutTokens | None:
        read = None if self.reader is None else self.reader.encoded(prompt)
        return self.encoder.take(prompt) if read is None else read

    def ids(self, text: str) -> list[int]:
        """Returns the tokens of a string inside a response."""
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def pieces(self, ids: Tensor) -> list[str]:
        """Returns the text that each token [token] adds to those before it; a letter that takes several comes with the
        last."""
        whole = [self.tokenizer.decode(ids[:end], skip_special_tokens=True) for end in range(len(ids) + 1)]
        texts = [*(text.rstrip("\ufffd") for text in whole[:-1]), whole[-1]]
        return [text[len(before) :] for before, text in pairwise(texts)]

    def rollouts(self, prompts: Sequence[Prompt], rows: list[RolloutTokens], group_size: int) -> Rollouts:
        """Builds the rollouts of these prompts from rows, `group_size` of them a prompt."""
        lengths = torch.tensor([len(r.response) for r in rows])
        texts = self.tokenizer.batch_decode([r.response for r in rows], skip_special_tokens=True)
        samples = [
            Sample(
                prompt=prompt,
                response=text,
                response_length=len(row.response),
                truncated=int(row.response[-1]) not in self.eos,
                max_response_length=self.max_response_length,
                prompt_opens_think=opens_thoughts(self.tokenizer, row.prompt),
            )
            for prompt, row, text in zip(prompts, rows, texts, strict=True)
        ]
        return Rollouts(
            samples=samples,
            inputs=rows,
            group=torch.arange(len(rows)) // group_size,
            mask=torch.arange(int(lengths.max())) < rearrange(lengths, "b -> b 1"),
        )


def end_tokens(generation: GenerationConfig, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Returns all ids that end a response, the model's own first."""
    declared = generation.eos_token_id
    ids = declared if isinstance(declared, list) else [declared]
    distinct = [i for i in dict.fromkeys([*ids, tokenizer.eos_token_id]) if i is not None]
    if not distinct:
        raise UserError("the model declares no end token: set eos_token_id in its generation_config.json")
    return tuple(distinct)


def never_sampled(model: PreTrainedModel, tokenizer: Tokenizer, eos: tuple[int, ...]) -> tuple[int, ...]:
    """Returns ids that can not be part of an answer: placeholders of images and videos, special tokens that do not end
    a response, and rows of the output matrix beyond the tokenizer's last id."""
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    beyond = set(range(len(tokenizer), model.get_output_embeddings().weight.shape[0]))
    return tuple(sorted((placeholder_ids(model) | special | beyond) - set(eos)))


def placeholder_ids(model: PreTrainedModel) -> set[int]:
    """Returns the ids that stand for images and videos, and for where these begin and end."""
    declared = model.config.to_dict()
    return {declared[key] for key in PLACEHOLDER_KEYS if declared.get(key) is not None}


def placeholders(model: PreTrainedModel, tokenizer: Tokenizer) -> list[str]:
    """Returns the texts of `placeholder_ids` that the tokenizer reads as these."""
    names = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items()}
    return [names[number] for number in sorted(placeholder_ids(model)) if number in names]

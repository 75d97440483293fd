"""Converts prompts to tokens and tokens to rollouts, with the model's own processor."""

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

# Keys of a model's configuration with ids of tokens for images and videos, which cannot be part of a response.
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
    """Converts between text and tokens, and holds the length limits of prompts and responses."""

    def __init__(
        self, processor: Processor, model: PreTrainedModel, max_prompt_length: int, response_limit: Schedule
    ) -> None:
        """max_prompt_length: in tokens. response_limit: maximum tokens of a response, by step."""
        self.processor, self.tokenizer = processor, processor.tokenizer
        self.eos = end_tokens(model.generation_config, self.tokenizer)
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token_id = self.eos[0]
        self.pad = self.tokenizer.pad_token_id
        self.suppressed = never_sampled(model, self.tokenizer, self.eos)
        self.max_prompt_length, self.response_limit = max_prompt_length, response_limit
        self.reader: PromptReader | None = None  # encodes prompts ahead of time, in another process
        self.encoder = PromptEncoder(processor, max_prompt_length, placeholders(model, self.tokenizer))

    @property
    def max_response_length(self) -> int:
        """The maximum length of a response at the current step, in tokens."""
        return int(self.response_limit.value)

    def encode(self, prompts: Sequence[Prompt]) -> list[RolloutTokens]:
        """Encodes prompts, as rollouts with empty responses; see `prompts.encode`. Prompts that were encoded ahead of
        time are not encoded again."""
        cached = [self._cached(prompt) for prompt in prompts]
        missing = [prompt for prompt, tokens in zip(prompts, cached, strict=True) if tokens is None]
        encoded = iter(encode(self.processor, missing, self.max_prompt_length))
        return [next(encoded) if tokens is None else tokens for tokens in cached]

    def _cached(self, prompt: Prompt) -> RolloutTokens | None:
        """Returns the encoding of a prompt that `reader` or `encoder` made earlier, None if there is none."""
        tokens = None if self.reader is None else self.reader.encoded(prompt)
        return self.encoder.take(prompt) if tokens is None else tokens

    def ids(self, text: str) -> list[int]:
        """Returns the token ids of a text inside a response, without special tokens."""
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def pieces(self, ids: Tensor) -> list[str]:
        """Returns the text that each of `ids` [token] adds to the text of the ids before it. A character that consists
        of several tokens is added by the last of them."""
        prefixes = [self.tokenizer.decode(ids[:end], skip_special_tokens=True) for end in range(len(ids) + 1)]
        # U+FFFD stands for the bytes of an incomplete character
        texts = [*(text.rstrip("\ufffd") for text in prefixes[:-1]), prefixes[-1]]
        return [text[len(previous) :] for previous, text in pairwise(texts)]

    def rollouts(self, prompts: Sequence[Prompt], rows: list[RolloutTokens], group_size: int) -> Rollouts:
        """Builds rollouts from rows of tokens, `group_size` per prompt. prompts: one per row."""
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
    """Returns the ids of all tokens that end a response: first the generation config's, then the tokenizer's.
    Raises UserError if there are none."""
    declared = generation.eos_token_id
    ids = declared if isinstance(declared, list) else [declared]
    distinct = [i for i in dict.fromkeys([*ids, tokenizer.eos_token_id]) if i is not None]
    if not distinct:
        raise UserError(
            "model.path: neither generation_config.json nor the tokenizer names an end token; set eos_token_id in "
            "generation_config.json"
        )
    return tuple(distinct)


def never_sampled(model: PreTrainedModel, tokenizer: Tokenizer, eos: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the ids that are never sampled: placeholders of images and videos, special tokens other than `eos`, and
    rows of the output matrix beyond the tokenizer's last id."""
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    unused_rows = set(range(len(tokenizer), model.get_output_embeddings().weight.shape[0]))
    return tuple(sorted((placeholder_ids(model) | special | unused_rows) - set(eos)))


def placeholder_ids(model: PreTrainedModel) -> set[int]:
    """Returns the ids of the placeholder tokens for images and videos, and of the tokens around them."""
    declared = model.config.to_dict()
    return {declared[key] for key in PLACEHOLDER_KEYS if declared.get(key) is not None}


def placeholders(model: PreTrainedModel, tokenizer: Tokenizer) -> list[str]:
    """Returns the texts of the placeholder tokens. The tokenizer would encode such a text as the placeholder."""
    names = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items()}
    return [names[number] for number in sorted(placeholder_ids(model)) if number in names]

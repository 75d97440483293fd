"""Prompts as a transformers image-text model reads them: chat template, processor, batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from mmrl.errors import UserError
from mmrl.rollouts import Prompt

# What a processor returns with one value a token. Listed by name: by shape, a picture's [1, 3] grid looks like three
# tokens.
PER_TOKEN = {"mm_token_type_ids", "token_type_ids"}


@dataclass(frozen=True)
class Tokens:
    """One rollout as the model sees it. `sequence` holds further inputs with one value a prompt token
    (mm_token_type_ids), `pictures` those that are laid out by picture (pixel_values, image_grid_thw). `experts` are
    those that an engine routed prompt and response to, but for the last token, which it only drew."""

    prompt: Tensor  # [prompt token] int64
    response: Tensor  # [response token] int64
    sequence: dict[str, Tensor]
    pictures: dict[str, Tensor]
    experts: Tensor | None = None  # [token, layer, k] int16
    temperature: float = 1.0  # at which the response was sampled, and is replayed


def save_processor(processor: Any, folder: Path) -> None:
    """As it was loaded: a fast tokenizer remembers how it padded and cut the last texts, and would write that down."""
    if isinstance(processor.tokenizer, PreTrainedTokenizerFast):
        processor.tokenizer.backend_tokenizer.no_padding()
        processor.tokenizer.backend_tokenizer.no_truncation()
    processor.save_pretrained(folder)


def encode(processor: Any, prompts: Sequence[Prompt], max_length: int) -> list[Tokens]:
    """The prompts through the chat template and the processor, with empty responses.

    Prompts with as many pictures of the same sizes go through the processor together: what it returns for them then
    falls into equal parts, which holds for every family.

    Raises UserError if a prompt is longer than max_length tokens; cutting it would cut picture tokens.
    """
    alike: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for place, prompt in enumerate(prompts):
        alike.setdefault(tuple(image.size for image in prompt.images), []).append(place)
    found = {
        place: tokens
        for places in alike.values()
        for place, tokens in zip(
            places, _encode_alike(processor, [prompts[p] for p in places], max_length), strict=True
        )
    }
    return [found[place] for place in range(len(prompts))]


def _encode_alike(processor: Any, prompts: Sequence[Prompt], max_length: int) -> list[Tokens]:
    texts = chat_texts(processor, prompts)
    images = {"images": [list(p.images) for p in prompts]} if prompts[0].images else {}  # nested: by prompt
    try:
        encoded = dict(processor(text=texts, return_tensors="pt", padding=True, **images))
    except ValueError as error:
        if len(prompts) > 1:  # which of them?
            return [row for prompt in prompts for row in _encode_alike(processor, [prompt], max_length)]
        raise UserError(f"prompt {prompts[0].id}: the model's processor does not take it: {error}") from error
    real = encoded.pop("attention_mask").bool()
    ids = encoded.pop("input_ids")
    pictures = {k: v.unflatten(0, (len(prompts), -1)) for k, v in encoded.items() if k not in PER_TOKEN}
    rows = []
    for i, prompt in enumerate(prompts):
        length = int(real[i].sum())
        if length > max_length:
            raise UserError(
                f"prompt {prompt.id} has {length} tokens, more than rollout.max_prompt_length="
                f"{max_length}; raise it, or lower model.processor.max_pixels"
            )
        sequence = {k: v[i][real[i]] for k, v in encoded.items() if k in PER_TOKEN}
        rows.append(Tokens(ids[i][real[i]], ids.new_empty(0), sequence, {k: v[i] for k, v in pictures.items()}))
    return rows


def chat_texts(processor: Any, prompts: Sequence[Prompt]) -> list[str]:
    """The prompts through the chat template, with one marker a picture."""
    chats = [messages(prompt) for prompt in prompts]
    return processor.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)


def collate(
    rows: Sequence[Tokens], *, pad: int, padding_side: str, device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """One batch of model inputs. Per-token inputs are padded to the longest row; per-picture inputs are zero-padded
    in their trailing dimensions and concatenated in the order of the rows."""
    ids = [torch.cat([r.prompt, r.response]) for r in rows]
    padded = {
        "input_ids": (ids, pad),
        "attention_mask": ([torch.ones_like(i) for i in ids], 0),
    }
    for key in {k: None for r in rows for k in r.sequence}:
        values = [r.sequence.get(key, torch.zeros_like(r.prompt)) for r in rows]
        padded[key] = ([torch.cat([v, torch.zeros_like(r.response)]) for v, r in zip(values, rows, strict=True)], 0)
    batch = {
        key: nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=fill, padding_side=padding_side)
        for key, (values, fill) in padded.items()
    }
    for key in {k: None for r in rows for k in r.pictures}:
        batch[key] = cat_padded([r.pictures[key] for r in rows if key in r.pictures])
    return {key: value.to(device) for key, value in batch.items()}


def messages(prompt: Prompt) -> list[dict[str, Any]]:
    """The prompt as chat messages; `<image>` in its text says where a picture goes, else the pictures come first.

    Raises UserError if the markers and the pictures do not match.
    """
    pieces = prompt.text.split("<image>")
    if len(pieces) == 1:
        pieces = [""] * len(prompt.images) + pieces
    if len(pieces) - 1 != len(prompt.images):
        raise UserError(f"prompt {prompt.id} has {len(pieces) - 1} <image> markers and {len(prompt.images)} images")
    content: list[dict[str, Any]] = []
    for number, piece in enumerate(pieces):
        if number > 0:
            content.append({"type": "image"})
        if piece:
            content.append({"type": "text", "text": piece})
    system = [{"role": "system", "content": [{"type": "text", "text": prompt.system}]}] if prompt.system else []
    return [*system, {"role": "user", "content": content}]


def cat_padded(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate on the first dimension, zero-padding the others to the largest."""
    target = [max(sizes) for sizes in zip(*(t.shape[1:] for t in tensors), strict=True)]

    def pad(t: Tensor) -> Tensor:
        widths = [w for size, want in zip(t.shape[:0:-1], target[::-1], strict=True) for w in (0, want - size)]
        return nn.functional.pad(t, widths)

    return torch.cat([pad(t) for t in tensors])

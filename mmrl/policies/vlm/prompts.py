"""Prompts as inputs of a transformers image-text model: chat template, processor, batches."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from mmrl.errors import UserError
from mmrl.policies.tokenizers import Processor
from mmrl.policies.vlm.templates import as_part, rendered
from mmrl.rollouts import Message, Prompt, Video

# Outputs of a processor with one value a token. Listed by name: by shape, an image's [1, 3] grid could be three tokens.
PER_TOKEN = {"mm_token_type_ids", "token_type_ids"}
RESPONSE = "\u2402response\u2403"  # stands for a response in a chat template; no template contains it


@dataclass(frozen=True)
class RolloutTokens:
    """The model inputs of one rollout. `sequence` holds further inputs with one value a prompt token
    (mm_token_type_ids), `images` those that are laid out by image (pixel_values, image_grid_thw). `experts` are those
    that an engine routed prompt and response to, but for the last token, which it only drew.

    In a conversation the response also holds the observations between its turns. `decided` marks the tokens that the
    policy chose; `read_sequence` and `read_images` are for the response what `sequence` and `images` are for the prompt
    (the former may end before the response does: tokens that the policy chose at its end have zeros).
    """

    prompt: Tensor  # [prompt token] int64
    response: Tensor  # [response token] int64
    sequence: dict[str, Tensor]
    images: dict[str, Tensor]
    experts: Tensor | None = None  # [token, layer, k] int16
    temperature: float = 1.0  # at which the response was sampled, and is replayed
    decided: Tensor | None = None  # [response token] bool; None: all of them
    read_sequence: dict[str, Tensor] = field(default_factory=dict)
    read_images: dict[str, Tensor] = field(default_factory=dict)

    @property
    def chosen(self) -> Tensor:
        """The mask of the policy's decisions, [response token] bool."""
        return torch.ones_like(self.response, dtype=torch.bool) if self.decided is None else self.decided

    def extended(self, ids: Tensor, *, decided: bool) -> RolloutTokens:
        """Returns the rollout with `ids` appended to the response. decided: whether the policy chose them."""
        return replace(
            self,
            response=torch.cat([self.response, ids]),
            decided=torch.cat([self.chosen, torch.full_like(ids, decided, dtype=torch.bool)]),
        )

    def with_observation(self, observation: RolloutTokens) -> RolloutTokens:
        """Returns the rollout with an observation appended to the response: the prompt of `observation`, images and
        all."""
        start = len(self.response)
        sequence = {
            key: torch.cat([_to_length(self.read_sequence.get(key), start, value), value])
            for key, value in observation.sequence.items()
        }
        grown = self.extended(observation.prompt, decided=False)
        images = joined_images([self.read_images, observation.images])
        return replace(grown, read_sequence=self.read_sequence | sequence, read_images=images)

    def without_response(self) -> RolloutTokens:
        """Returns the prompt with an empty response."""
        return replace(self, response=self.response[:0], decided=None, read_sequence={}, read_images={})

    def with_prompt(self, prompt: RolloutTokens) -> RolloutTokens:
        """Returns the same response to another prompt, routed anew."""
        return replace(
            prompt,
            response=self.response,
            temperature=self.temperature,
            decided=self.decided,
            read_sequence=self.read_sequence,
            read_images=self.read_images,
        )


def joined_images(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Returns the inputs of the images of all parts, in order."""
    images: dict[str, Tensor] = {}
    for part in parts:
        for key, value in part.items():
            images[key] = cat_padded([images[key], value]) if key in images else value
    return images


def _to_length(values: Tensor | None, length: int, like: Tensor) -> Tensor:
    """Pads `values` with zeros to `length`. like: gives dtype and device of missing values."""
    present = like.new_zeros(0) if values is None else values
    return torch.cat([present, present.new_zeros(length - len(present))])


def save_processor(processor: Processor, folder: Path) -> None:
    """Saves the processor as it was loaded: a fast tokenizer remembers the last padding and truncation, and would save
    them."""
    if isinstance(processor.tokenizer, PreTrainedTokenizerFast):
        processor.tokenizer.backend_tokenizer.no_padding()
        processor.tokenizer.backend_tokenizer.no_truncation()
    processor.save_pretrained(folder)


def encode(processor: Processor, prompts: Sequence[Prompt], max_length: int) -> list[RolloutTokens]:
    """Encodes prompts by the chat template and the processor, with empty responses.

    Raises UserError if a prompt is longer than max_length tokens; cutting it would cut image tokens.
    """
    names = [f"prompt {prompt.id}" for prompt in prompts]
    images, videos = [images_of(prompt) for prompt in prompts], [videos_of(prompt) for prompt in prompts]
    encoded = read(processor, chat_texts(processor, prompts), images, names, videos=videos)
    for prompt, tokens in zip(prompts, encoded, strict=True):
        if len(tokens.prompt) > max_length:
            raise UserError(
                f"prompt {prompt.id} has {len(tokens.prompt)} tokens, more than rollout.max_prompt_length="
                f"{max_length}; raise it, or lower model.processor.max_pixels"
            )
    return encoded


def read(
    processor: Processor,
    texts: Sequence[str],
    images: Sequence[Sequence[Image.Image]],
    names: Sequence[str],
    *,
    videos: Sequence[Sequence[Video]] | None = None,
    inside: bool = False,
) -> list[RolloutTokens]:
    """Encodes texts with one marker an image or video by the processor, as prompts. names: of the texts, for messages.
    inside: a string continues a prompt, so that nothing is put before it. Raises UserError for one that the processor
    does not take.

    Texts with as many images and videos of the same sizes go through the processor together: its outputs then fall into
    equal parts, which holds for every family.
    """
    videos = [()] * len(texts) if videos is None else videos
    by_sizes: dict[tuple[Any, ...], list[int]] = {}
    for index, (row_images, row_videos) in enumerate(zip(images, videos, strict=True)):
        sizes = (*(image.size for image in row_images), *(video.shape for video in row_videos))
        by_sizes.setdefault(sizes, []).append(index)
    encoded: dict[int, RolloutTokens] = {}
    for indices in by_sizes.values():
        rows = [_Row(names[i], texts[i], list(images[i]), list(videos[i])) for i in indices]
        part = _read_alike(processor, rows, inside)
        encoded |= dict(zip(indices, part, strict=True))
    return [encoded[index] for index in range(len(texts))]


@dataclass(frozen=True)
class _Row:
    name: str
    text: str
    images: list[Image.Image]
    videos: list[Video]


def _read_alike(processor: Processor, rows: Sequence[_Row], inside: bool) -> list[RolloutTokens]:
    """Encodes prompts that all have the same number of images and videos in one call of the processor. Raises UserError
    naming the prompt that it refuses."""
    texts = [row.text for row in rows]
    more: dict[str, Any] = {"add_special_tokens": False} if inside else {}
    if rows[0].images:
        more["images"] = [row.images for row in rows]  # nested: by text
    if rows[0].videos:
        videos = [video for row in rows for video in row.videos]
        more |= {
            "videos": [list(video.frames) for video in videos],
            "video_metadata": [video.times() for video in videos],
        }
        more["do_sample_frames"] = False  # the model sees the frames that rewards and tables see
    try:
        encoded = dict(processor(text=texts, return_tensors="pt", padding=True, **more))
    except ValueError as error:
        if len(rows) > 1:  # find out which
            return [tokens for row in rows for tokens in _read_alike(processor, [row], inside)]
        raise UserError(f"{rows[0].name}: the model's processor does not accept it: {error}") from error
    real = encoded.pop("attention_mask").bool()
    ids = encoded.pop("input_ids")
    images = {k: v.unflatten(0, (len(texts), -1)) for k, v in encoded.items() if k not in PER_TOKEN}
    tokens = []
    for i in range(len(texts)):
        sequence = {k: v[i][real[i]] for k, v in encoded.items() if k in PER_TOKEN}
        tokens.append(RolloutTokens(ids[i][real[i]], ids.new_empty(0), sequence, {k: v[i] for k, v in images.items()}))
    return tokens


def chat_texts(processor: Processor, prompts: Sequence[Prompt]) -> list[str]:
    """Renders prompts by the chat template, with one marker an image or video."""
    return [rendered(processor, chat(prompt), prompt.tools) for prompt in prompts]


def between(processor: Processor, messages: Sequence[Message], observation: Sequence[Message], ending: str) -> str:
    """Returns the chat template's text between a response to `messages` that ended with the text `ending` and the next
    response, which follows `observation`. Where the template closes a response with another text than `ending`, the
    result includes it.

    Raises UserError for a template that does not show what assistants said.
    """
    whole = rendered(processor, [*messages, Message("assistant", (RESPONSE,)), *observation])
    _, marker, rest = whole.rpartition(RESPONSE)
    if not marker:
        raise UserError("the model's chat template does not show responses, so a conversation can not go on with it")
    return rest.removeprefix(ending)


def collate(
    rows: Sequence[RolloutTokens], *, pad: int, padding_side: str, device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """Returns one batch of model inputs. Per-token inputs are padded to the longest row; per-image inputs are
    zero-padded in their trailing dimensions and concatenated in the order of the rows."""
    ids = [torch.cat([r.prompt, r.response]) for r in rows]
    padded = {
        "input_ids": (ids, pad),
        "attention_mask": ([torch.ones_like(i) for i in ids], 0),
    }
    for key in {k: None for r in rows for k in (*r.sequence, *r.read_sequence)}:
        padded[key] = ([_per_token(r, key) for r in rows], 0)
    batch = {
        key: nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=fill, padding_side=padding_side)
        for key, (values, fill) in padded.items()
    }
    for key in {k: None for r in rows for k in (*r.images, *r.read_images)}:
        batch[key] = cat_padded([held[key] for r in rows for held in (r.images, r.read_images) if key in held])
    return {key: value.to(device) for key, value in batch.items()}


def _per_token(row: RolloutTokens, key: str) -> Tensor:
    """Returns an input of prompt and response with one value a token, [token]."""
    first = _to_length(row.sequence.get(key), len(row.prompt), row.prompt)
    return torch.cat([first, _to_length(row.read_sequence.get(key), len(row.response), row.prompt)])


def messages(prompt: Prompt) -> list[dict[str, Any]]:
    """Returns the prompt as chat templates take it; see `chat`."""
    return [as_template(message) for message in chat(prompt)]


def chat(prompt: Prompt) -> tuple[Message, ...]:
    """Returns the prompt as chat messages; `<image>` and `<video>` in its text mark where an image and a video go, else
    they come first.

    Raises UserError if the markers do not match the images and videos.
    """
    if prompt.messages:
        return prompt.messages
    held: dict[str, Sequence[Image.Image | Video]] = {"<image>": prompt.images, "<video>": prompt.videos}
    pieces: list[Any] = re.split("(<image>|<video>)", prompt.text)
    if len(pieces) == 1:
        pieces = [*prompt.images, *prompt.videos, prompt.text]
    else:
        for marker, shown in held.items():
            if (count := pieces.count(marker)) != len(shown):
                kind = "images" if marker == "<image>" else "videos"
                raise UserError(f"prompt {prompt.id} has {count} {marker} markers and {len(shown)} {kind}")
        rest = {marker: iter(shown) for marker, shown in held.items()}
        pieces = [next(rest[piece]) if piece in rest else piece for piece in pieces]
    system = (Message("system", (prompt.system,)),) if prompt.system else ()
    return (*system, Message("user", tuple(piece for piece in pieces if piece)))


def images_of(prompt: Prompt) -> tuple[Image.Image, ...]:
    """Returns all images of a prompt that the policy sees, in order."""
    return tuple(image for message in chat(prompt) for image in message.images)


def videos_of(prompt: Prompt) -> tuple[Video, ...]:
    """Returns all videos of a prompt that the policy sees, in order."""
    return tuple(video for message in chat(prompt) for video in message.videos)


def as_template(message: Message) -> dict[str, Any]:
    """Returns a message as chat templates take it."""
    return {"role": message.role, "content": [as_part(part) for part in message.parts]}


def cat_padded(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenates on the first dimension, zero-padding the others to the largest."""
    target = [max(sizes) for sizes in zip(*(t.shape[1:] for t in tensors), strict=True)]

    def pad(t: Tensor) -> Tensor:
        widths = [w for size, want in zip(t.shape[:0:-1], target[::-1], strict=True) for w in (0, want - size)]
        return nn.functional.pad(t, widths)

    return torch.cat([pad(t) for t in tensors])

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

# Outputs of a processor with one value per token. They are listed by name, because their shape may be ambiguous: a
# [1, 3] grid of an image could be three tokens.
PER_TOKEN = {"mm_token_type_ids", "token_type_ids"}
PIXELS, VIDEO_PIXELS = "pixel_values", "pixel_values_videos"  # the inputs of images and videos in all families
RESPONSE = "\u2402response\u2403"  # stands for a response in a chat template; no template contains it


@dataclass(frozen=True)
class RolloutTokens:
    """The model inputs of one rollout.

    In a conversation with an environment, `response` holds the observations between the turns too; `decided` is false
    for their tokens.
    """

    prompt: Tensor  # [prompt token] int64
    response: Tensor  # [response token] int64
    sequence: dict[str, Tensor]  # further inputs of the prompt with one value per token, such as mm_token_type_ids
    images: dict[str, Tensor]  # inputs of the images of the prompt, such as pixel_values and image_grid_thw
    # [token, layer, k] int16, the experts to which vLLM routed the tokens of prompt and response. The last token has
    # none: it was sampled, but is no input of the model.
    experts: Tensor | None = None
    temperature: float = 1.0  # of sampling the response, and of its recomputed log-probabilities
    decided: Tensor | None = None  # [response token] bool, true for tokens of the policy; None: all of them
    # Like `sequence` and `images`, but of the observations in the response. `observed_sequence` may be shorter than the
    # response; the missing values are 0.
    observed_sequence: dict[str, Tensor] = field(default_factory=dict)
    observed_images: dict[str, Tensor] = field(default_factory=dict)

    @property
    def decision_mask(self) -> Tensor:
        """The mask of the tokens that the policy sampled, not the environment, [response token] bool."""
        return torch.ones_like(self.response, dtype=torch.bool) if self.decided is None else self.decided

    def extended(self, ids: Tensor, *, decided: bool) -> RolloutTokens:
        """Returns the rollout with `ids` [token] appended to the response. decided: whether the policy sampled them."""
        return replace(
            self,
            response=torch.cat([self.response, ids]),
            decided=torch.cat([self.decision_mask, torch.full_like(ids, decided, dtype=torch.bool)]),
        )

    def with_observation(self, observation: RolloutTokens) -> RolloutTokens:
        """Returns the rollout with an observation of the environment appended to the response.

        observation: its tokens and images, in the fields `prompt`, `sequence` and `images`, as `encode_texts` returns
        them.
        """
        start = len(self.response)
        sequence = {
            key: torch.cat([_to_length(self.observed_sequence.get(key), start, value), value])
            for key, value in observation.sequence.items()
        }
        extended = self.extended(observation.prompt, decided=False)
        images = joined_images([self.observed_images, observation.images])
        return replace(extended, observed_sequence=self.observed_sequence | sequence, observed_images=images)

    def without_response(self) -> RolloutTokens:
        """Returns the prompt with an empty response."""
        return replace(self, response=self.response[:0], decided=None, observed_sequence={}, observed_images={})

    def with_prompt(self, prompt: RolloutTokens) -> RolloutTokens:
        """Returns the same response to another prompt, without recorded experts."""
        return replace(
            prompt,
            response=self.response,
            temperature=self.temperature,
            decided=self.decided,
            observed_sequence=self.observed_sequence,
            observed_images=self.observed_images,
        )


def joined_images(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Concatenates model inputs of images, such as pixel_values, by name. parts: inputs of several groups of images."""
    images: dict[str, Tensor] = {}
    for part in parts:
        for key, value in part.items():
            images[key] = cat_padded([images[key], value]) if key in images else value
    return images


def _to_length(values: Tensor | None, length: int, like: Tensor) -> Tensor:
    """Pads `values` [token] with zeros to `length`; None becomes all zeros, with dtype and device of `like`."""
    present = like.new_zeros(0) if values is None else values
    return torch.cat([present, present.new_zeros(length - len(present))])


def save_processor(processor: Processor, folder: Path) -> None:
    """Saves the processor without the padding and truncation of its last call, which a fast tokenizer would save."""
    if isinstance(processor.tokenizer, PreTrainedTokenizerFast):
        processor.tokenizer.backend_tokenizer.no_padding()
        processor.tokenizer.backend_tokenizer.no_truncation()
    processor.save_pretrained(folder)


def encode(processor: Processor, prompts: Sequence[Prompt], max_length: int) -> list[RolloutTokens]:
    """Encodes prompts by the chat template and the processor, as rollouts with empty responses.

    max_length: in tokens. Raises UserError if a prompt is longer; truncation could cut image tokens.
    """
    names = [f"prompt {prompt.id}" for prompt in prompts]
    images, videos = [images_of(prompt) for prompt in prompts], [videos_of(prompt) for prompt in prompts]
    encoded = encode_texts(processor, chat_texts(processor, prompts), images, names, videos=videos)
    for prompt, tokens in zip(prompts, encoded, strict=True):
        if len(tokens.prompt) > max_length:
            raise UserError(
                f"prompt {prompt.id} has {len(tokens.prompt)} tokens, more than rollout.max_prompt_length="
                f"{max_length}; raise it, or lower model.processor.max_pixels"
            )
    return encoded


def encode_texts(
    processor: Processor,
    texts: Sequence[str],
    images: Sequence[Sequence[Image.Image]],
    names: Sequence[str],
    *,
    videos: Sequence[Sequence[Video]] | None = None,
    inside: bool = False,
) -> list[RolloutTokens]:
    """Encodes texts, images and videos with the processor, as rollouts with empty responses.

    texts: with one placeholder per image or video. images, videos: for each text its images and videos, in the order of
    its placeholders. names: a name for each text, for error messages. inside: the texts continue a prompt, so no
    special tokens are added. Raises UserError if the processor refuses a text.

    Texts whose images and videos have equal sizes go through the processor together: its outputs can then be split
    evenly, in every model family.
    """
    videos = [()] * len(texts) if videos is None else videos
    by_sizes: dict[tuple[Any, ...], list[int]] = {}
    for index, (row_images, row_videos) in enumerate(zip(images, videos, strict=True)):
        sizes = (*(image.size for image in row_images), *(video.shape for video in row_videos))
        by_sizes.setdefault(sizes, []).append(index)
    encoded: dict[int, RolloutTokens] = {}
    for indices in by_sizes.values():
        rows = [_Row(names[i], texts[i], list(images[i]), list(videos[i])) for i in indices]
        encoded |= dict(zip(indices, _encode_same_sizes(processor, rows, inside), strict=True))
    return [encoded[index] for index in range(len(texts))]


@dataclass(frozen=True)
class _Row:
    """One text with its images and videos, to be encoded."""

    name: str
    text: str
    images: list[Image.Image]
    videos: list[Video]


def _encode_same_sizes(processor: Processor, rows: Sequence[_Row], inside: bool) -> list[RolloutTokens]:
    """Encodes texts whose images and videos have equal sizes, in one call of the processor. Raises UserError with the
    name of the first text that the processor refuses."""
    texts = [row.text for row in rows]
    options: dict[str, Any] = {"add_special_tokens": False} if inside else {}
    if rows[0].images:
        options["images"] = [row.images for row in rows]  # one list per text
    if rows[0].videos:
        videos = [video for row in rows for video in row.videos]
        options |= {
            "videos": [list(video.frames) for video in videos],
            "video_metadata": [video.times() for video in videos],
        }
        options["do_sample_frames"] = False  # the model gets the same frames as rewards and reports
    try:
        encoded = dict(processor(text=texts, return_tensors="pt", padding=True, **options))
    except ValueError as error:
        if len(rows) > 1:  # one by one, to find the text that the processor refuses
            return [tokens for row in rows for tokens in _encode_same_sizes(processor, [row], inside)]
        raise UserError(
            f"{rows[0].name}: the model's processor does not accept it: {error}; change its text or images"
        ) from error
    unpadded = encoded.pop("attention_mask").bool()
    ids = encoded.pop("input_ids")
    # the processor concatenates the images of all texts; each text has equally many of equal size
    images = {k: v.unflatten(0, (len(texts), -1)) for k, v in encoded.items() if k not in PER_TOKEN}
    tokens = []
    for i in range(len(texts)):
        sequence = {k: v[i][unpadded[i]] for k, v in encoded.items() if k in PER_TOKEN}
        row_images = {k: v[i] for k, v in images.items()}
        tokens.append(RolloutTokens(ids[i][unpadded[i]], ids.new_empty(0), sequence, row_images))
    return tokens


def chat_texts(processor: Processor, prompts: Sequence[Prompt]) -> list[str]:
    """Renders prompts as text by the chat template, with one placeholder per image or video."""
    return [rendered(processor, chat(prompt), prompt.tools) for prompt in prompts]


def between(processor: Processor, messages: Sequence[Message], observation: Sequence[Message], ending: str) -> str:
    """Returns the text that the chat template puts between two responses: the end of the turn, the observation of the
    environment, and the beginning of the next response.

    messages: all messages before the first of the two responses. ending: the text of the end token that the policy
    sampled, which is not repeated; if the template ends a response differently, its own ending is part of the result.
    Raises UserError for a template that leaves out messages of the assistant.
    """
    text = rendered(processor, [*messages, Message("assistant", (RESPONSE,)), *observation])
    _, marker, rest = text.rpartition(RESPONSE)
    if not marker:
        raise UserError(
            "the model's chat template leaves out messages of the assistant, which conversations need "
            "(task.environment, task.game); take a model whose template shows them"
        )
    return rest.removeprefix(ending)


def collate(
    rows: Sequence[RolloutTokens],
    *,
    pad: int,
    padding_side: str,
    device: torch.device | str = "cpu",
    pixels: bool = True,
) -> dict[str, Tensor]:
    """Collates rows of prompt and response into one batch of model inputs.

    pad: the id of the padding token. Inputs per token become [row, length], padded to the longest row on
    `padding_side`; inputs per image are concatenated in the order of the rows, with trailing dimensions zero-padded.
    pixels: False leaves out `pixel_values`.
    """
    ids = [torch.cat([r.prompt, r.response]) for r in rows]
    padded = {
        "input_ids": (ids, pad),
        "attention_mask": ([torch.ones_like(i) for i in ids], 0),
    }
    for key in {k: None for r in rows for k in (*r.sequence, *r.observed_sequence)}:  # an ordered set of keys
        padded[key] = ([_per_token(r, key) for r in rows], 0)
    batch = {
        key: nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=fill, padding_side=padding_side)
        for key, (values, fill) in padded.items()
    }
    image_keys = {k: None for r in rows for k in (*r.images, *r.observed_images) if pixels or k != PIXELS}
    for key in image_keys:
        batch[key] = cat_padded([part[key] for r in rows for part in (r.images, r.observed_images) if key in part])
    return {key: value.to(device) for key, value in batch.items()}


def _per_token(row: RolloutTokens, key: str) -> Tensor:
    """Returns the values of the per-token input `key` for prompt and response, [token]; 0 where they are missing."""
    prompt_values = _to_length(row.sequence.get(key), len(row.prompt), row.prompt)
    return torch.cat([prompt_values, _to_length(row.observed_sequence.get(key), len(row.response), row.prompt)])


def messages(prompt: Prompt) -> list[dict[str, Any]]:
    """Returns the prompt as messages in the format of `apply_chat_template`; see `chat`."""
    return [as_template(message) for message in chat(prompt)]


def chat(prompt: Prompt) -> tuple[Message, ...]:
    """Returns the prompt as chat messages, with its system text as the first one.

    `<image>` and `<video>` in the text of the prompt say where its images and videos go; without these markers images
    and videos come before the text. Raises UserError if there are more or fewer markers than images or videos.
    """
    if prompt.messages:
        return prompt.messages
    media_by_marker: dict[str, Sequence[Image.Image | Video]] = {"<image>": prompt.images, "<video>": prompt.videos}
    pieces: list[Any] = re.split("(<image>|<video>)", prompt.text)
    if len(pieces) == 1:
        pieces = [*prompt.images, *prompt.videos, prompt.text]
    else:
        for marker, media in media_by_marker.items():
            if (count := pieces.count(marker)) != len(media):
                kind = "images" if marker == "<image>" else "videos"
                raise UserError(
                    f"prompt {prompt.id} has {count} {marker} markers but {len(media)} {kind}; write one marker for "
                    "each, or none at all"
                )
        remaining = {marker: iter(media) for marker, media in media_by_marker.items()}
        pieces = [next(remaining[piece]) if piece in remaining else piece for piece in pieces]
    system = (Message("system", (prompt.system,)),) if prompt.system else ()
    return (*system, Message("user", tuple(piece for piece in pieces if piece)))


def images_of(prompt: Prompt) -> tuple[Image.Image, ...]:
    """Returns all images of a prompt that the policy sees, in order."""
    return tuple(image for message in chat(prompt) for image in message.images)


def videos_of(prompt: Prompt) -> tuple[Video, ...]:
    """Returns all videos of a prompt that the policy sees, in order."""
    return tuple(video for message in chat(prompt) for video in message.videos)


def as_template(message: Message) -> dict[str, Any]:
    """Returns a message in the format of `apply_chat_template`: its role, and a list of content parts."""
    return {"role": message.role, "content": [as_part(part) for part in message.parts]}


def cat_padded(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenates tensors on the first dimension; the other dimensions are zero-padded at their end to the largest
    size among the tensors."""
    max_sizes = [max(sizes) for sizes in zip(*(t.shape[1:] for t in tensors), strict=True)]

    def pad(t: Tensor) -> Tensor:
        """Pads a tensor to `max_sizes`."""
        widths: list[int] = []  # as torch wants them: (before, after) for each dimension, the last dimension first
        for size, max_size in zip(t.shape[:0:-1], max_sizes[::-1], strict=True):
            widths += [0, max_size - size]
        return nn.functional.pad(t, widths)

    return torch.cat([pad(t) for t in tensors])

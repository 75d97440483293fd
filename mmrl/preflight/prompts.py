"""Probes of prompts: training prompts among the held-out ones, and images of a single color."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mmrl.preflight.alarms import Alarm, abbreviate
from mmrl.protocols.parts import Source
from mmrl.rollouts import Prompt

READ_ALL_UP_TO = 2000  # a source with more prompts is sampled
SAMPLE_SIZE = 200  # prompts of such a sample
IMAGE_BYTES = 1 << 29  # memory for the images of all prompts


def sample_prompts(source: Source, num_prompts: int | None = None) -> list[Prompt]:
    """Returns prompts of a source at evenly spaced indices.

    num_prompts: default: all, or SAMPLE_SIZE of a source larger than READ_ALL_UP_TO. It is lowered so that the images
    fit into IMAGE_BYTES if all prompts have as many pixels as the first.
    """
    size = len(source)
    num_selected = min(size, num_prompts or (size if size <= READ_ALL_UP_TO else SAMPLE_SIZE))
    if not num_selected:
        return []
    first = source[0]
    frames = [*first.images, *(frame for video in first.videos for frame in video.frames)]
    bytes_per_prompt = 3 * sum(image.width * image.height for image in frames)
    num_selected = max(1, min(num_selected, IMAGE_BYTES // max(1, bytes_per_prompt)))
    return [first, *(source[index * size // num_selected] for index in range(1, num_selected))]


def select_evenly(prompts: Sequence[Prompt], num_prompts: int) -> list[Prompt]:
    """Returns up to `num_prompts` prompts at evenly spaced indices."""
    num_selected = min(num_prompts, len(prompts))
    return [prompts[index * len(prompts) // num_selected] for index in range(num_selected)]


def probe_overlap(train: Sequence[Prompt], held_out: Sequence[Prompt], key: str) -> Iterator[Alarm]:
    """Yields an alarm for held-out prompts that are also in the training data. key: the configuration key that names
    the held-out data."""
    train_ids = {_content_hash(prompt): prompt.id for prompt in train}
    overlap = [
        (prompt.id, train_ids[_content_hash(prompt)]) for prompt in held_out if _content_hash(prompt) in train_ids
    ]
    if overlap:
        pairs = abbreviate(f"{held_out_id} is {train_id}" for held_out_id, train_id in overlap)
        yield Alarm(
            "data",
            "warned",
            f"{key}: {len(overlap)} of {len(held_out)} held-out prompts are trained on too ({pairs}); remove them from "
            "one of the two files",
        )


def probe_images(prompts: Sequence[Prompt]) -> Iterator[Alarm]:
    """Yields an alarm for images of a single color, such as a white drawing whose transparent background turned
    white."""
    blank = [prompt.id for prompt in prompts if any(_is_blank(image) for image in prompt.images)]
    if blank:
        yield Alarm(
            "data",
            "warned",
            f"images of a single color in {abbreviate(blank)} ({len(blank)} of {len(prompts)} rows): if it is a white "
            "drawing on a transparent background, which is read as white, save it on a background of another color",
        )


def _content_hash(prompt: Prompt) -> str:
    """Returns the SHA-256 of a prompt's texts, answer, seed, images and video frames, to find duplicates."""
    digest = hashlib.sha256(
        repr((prompt.text, str(prompt.answer), prompt.system, prompt.metadata.get("seed"))).encode()
    )
    for image in prompt.images:
        digest.update(repr(image.size).encode() + image.tobytes())
    for video in prompt.videos:
        for frame in video.frames:
            digest.update(frame.tobytes())
    for message in prompt.messages:
        digest.update(message.text.encode())
    return digest.hexdigest()


def _is_blank(image: Any) -> bool:
    pixels = np.asarray(image)
    return bool(pixels.size and (pixels == pixels.reshape(-1, pixels.shape[-1])[0]).all())

"""Probes of prompts: those that are trained on and held out at once, images that show nothing, boxes outside."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mmrl.preflight.alarms import Alarm, some
from mmrl.protocols.parts import Source
from mmrl.rollouts import Prompt

EVERY = 2000  # rows of a file up to which all of them are read
SAMPLE = 200  # rows of a larger one
MEMORY = 1 << 29  # bytes of images that are held at once


def sampled(source: Source, count: int | None = None) -> list[Prompt]:
    """Returns `count` prompts of a source, evenly spread; default: all of a small one, as far as their images fit in
    MEMORY by the size of the first."""
    size = len(source)
    wanted = min(size, count or (size if size <= EVERY else SAMPLE))
    if not wanted:
        return []
    first = source[0]
    frames = [*first.images, *(frame for video in first.videos for frame in video.frames)]
    held = 3 * sum(image.width * image.height for image in frames)
    wanted = max(1, min(wanted, MEMORY // max(1, held)))
    return [first, *(source[index * size // wanted] for index in range(1, wanted))]


def spread(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """Returns `count` of some prompts, evenly spread."""
    wanted = min(count, len(prompts))
    return [prompts[index * len(prompts) // wanted] for index in range(wanted)]


def probe_overlap(train: Sequence[Prompt], held_out: Sequence[Prompt], key: str) -> Iterator[Alarm]:
    """Finds held-out prompts that are trained on as well. key: of the configuration, that names the held-out ones."""
    known = {_content(prompt): prompt.id for prompt in train}
    same = [(prompt.id, known[_content(prompt)]) for prompt in held_out if _content(prompt) in known]
    if same:
        pairs = some(f"{one} is {other}" for one, other in same)
        yield Alarm(
            "data",
            "warned",
            f"{key}: {len(same)} of {len(held_out)} held-out prompts are trained on too ({pairs}); hold others out",
        )


def probe_images(prompts: Sequence[Prompt]) -> Iterator[Alarm]:
    """Finds images of a single colour: a drawing that was lost, such as white strokes on a transparent ground."""
    blank = [prompt.id for prompt in prompts if any(_is_blank(image) for image in prompt.images)]
    if blank:
        yield Alarm(
            "data",
            "warned",
            f"images of a single colour in {some(blank)} ({len(blank)} of {len(prompts)} rows): if a drawing was "
            "lost, it is white on a transparent ground, which is shown on white; save it on a ground of another colour",
        )


def _content(prompt: Prompt) -> str:
    """Returns a SHA-256 of what a prompt shows and asks, images and frames included, to find duplicates."""
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

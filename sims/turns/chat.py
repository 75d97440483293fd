"""Conversion of chat messages from the OpenAI format."""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from PIL import Image

from mmrl.rollouts import Message
from mmrl.runtime.images import to_rgb

Part = str | Image.Image


def message(written: Mapping[str, Any]) -> Message:
    """Converts {"role", "content"} to a Message. content is text or a list of parts {"type": "text", "text": ...} and
    {"type": "image_url", "image_url": {"url": "data:image/..."}}. Raises ValueError for other parts."""
    content = written.get("content")
    parts = [content] if isinstance(content, str) else [_part(part) for part in content or ()]
    return Message(
        str(written["role"]), tuple(part for part in parts if part != "") or (" ",)
    )  # a message needs a part


def _part(part: Mapping[str, Any]) -> Part:
    """Converts a part of a message's content, of type text or image_url. Raises ValueError for another type."""
    if part.get("type") == "text":
        return str(part["text"])
    if part.get("type") == "image_url":
        return read_image(part["image_url"]["url"])
    raise ValueError(f"a message has a part of type {part.get('type')!r:.40}; only text and image_url are supported")


def read_image(written: object) -> Image.Image:
    """Reads an image: a file in base64, with or without the prefix `data:image/...;base64,`, or an array [height,
    width, 3] of numbers from 0 to 255. Raises ValueError for anything else."""
    if isinstance(written, Image.Image):
        return to_rgb(written)
    if isinstance(written, str):
        try:
            file = base64.b64decode(written.rpartition(";base64,")[2], validate=True)
            return to_rgb(Image.open(io.BytesIO(file)))
        except (binascii.Error, OSError, ValueError) as error:
            raise ValueError(f"not an image in base64 ({' '.join(str(error).split())})") from None
    try:
        pixels = np.asarray(written)
        if pixels.ndim == 3 and pixels.shape[2] == 3 and pixels.min() >= 0 and pixels.max() <= 255:
            return Image.fromarray(pixels.astype(np.uint8))
    except (TypeError, ValueError) as error:
        raise ValueError(f"not an image [height, width, 3] of numbers from 0 to 255: {error}") from None
    raise ValueError(f"not an image [height, width, 3] of numbers from 0 to 255: shape {pixels.shape}")


def joined(parts: Iterable[Part]) -> tuple[Part, ...]:
    """Joins consecutive texts with line breaks; images stay as they are."""
    merged: list[Part] = []
    for part in parts:
        before = merged.pop() if isinstance(part, str) and merged and isinstance(merged[-1], str) else None
        merged.append(part if before is None else f"{before}\n{part}")
    return tuple(merged)

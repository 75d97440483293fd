"""Questions that are lists of messages, with `role` and `content`, or with `from` and `value` (ShareGPT)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmrl.runtime.jsonl import RowError

MARKER, VIDEO_MARKER = "<image>", "<video>"
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
MARKERS = {
    "image": MARKER,
    "image_url": MARKER,
    "input_image": MARKER,
    "video": VIDEO_MARKER,
    "video_url": VIDEO_MARKER,
}
TEXT_TYPES = ("text", "input_text")
REFERENCE_KEYS = ("image", "image_url", "video", "video_url", "url", "path", "bytes")  # keys of a part with its image


@dataclass(frozen=True)
class ParsedQuestion:
    """A question with markers (<image>, <video>) in its text.

    images, videos: the reference for each marker, None for the next one of the row's column. reply: the last message,
    if it is an assistant's.
    """

    text: str
    system: str | None = None
    images: tuple[Any, ...] = ()
    videos: tuple[Any, ...] = ()
    reply: str | None = None


def is_messages(value: object) -> bool:
    """Returns whether a value is meant as a list of messages, well formed or not."""
    return isinstance(value, list | tuple) and bool(value) and isinstance(value[0], Mapping)


def read_messages(messages: Sequence[Any]) -> ParsedQuestion:
    """Reads one user message, with an optional system message before and an optional assistant message after it.

    Content is text, or a list of parts of type text, image or video, as in OpenAI's API and chat templates. Raises
    RowError for other roles or another order of them.
    """
    roles = [_role(message, index) for index, message in enumerate(messages)]
    without_reply = roles[:-1] if roles[-1] == "assistant" else roles
    if without_reply not in (["user"], ["system", "user"]):
        raise RowError(
            f"the messages have the roles {', '.join(roles)}, but a question is one user message, with or without a "
            "system message before it; task.data.type=conversations reads whole conversations"
        )
    system = _text(messages[0]) if roles[0] == "system" else None
    reply = _text(messages[-1]) if roles[-1] == "assistant" else None
    question = messages[roles.index("user")]
    texts: list[str] = []
    references: dict[str, list[Any]] = {MARKER: [], VIDEO_MARKER: []}
    for part in _parts(question):
        text, reference = _part(part)
        texts.append(text)
        if reference is not None:  # then the text is the marker of an image or a video
            references[text].append(reference)
        else:
            for marker in references:
                references[marker] += [None] * text.count(marker)
    return ParsedQuestion("".join(texts), system, tuple(references[MARKER]), tuple(references[VIDEO_MARKER]), reply)


def fill_markers(references: Sequence[Any], column: Sequence[Any]) -> list[Any]:
    """Returns the references of all markers in order: each None is replaced by the next value of the row's column. The
    column's remaining values follow."""
    remaining = iter(column)
    filled = [next(remaining, None) if reference is None else reference for reference in references]
    return filled + list(remaining)


def _role(message: object, index: int) -> str:
    """Returns the role of a message: user, assistant or system. Raises RowError for an unknown one."""
    if not isinstance(message, Mapping):
        raise RowError(f"message {index} must be an object, not {type(message).__name__}")
    role = message.get("role") or message.get("from")
    if role not in ROLES:
        raise RowError(f"message {index}: role {role!r:.40} is not one of {', '.join(ROLES)}")
    return ROLES[role]


def _parts(message: Mapping[str, Any]) -> Sequence[Any]:
    """Returns the content of a message as a list of parts. Raises RowError if it is neither text nor a list."""
    content = message.get("content") if message.get("content") is not None else message.get("value")
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list | tuple):
        raise RowError(f"the content of a message must be text or a list of parts, not {type(content).__name__}")
    return content


def _part(part: Any) -> tuple[str, Any]:
    """Returns the text of a part and None, or for an image or video its marker and its reference (None: the next one of
    the row's column). Raises RowError for another type."""
    if isinstance(part, str):
        return part, None
    part_type = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if part_type in TEXT_TYPES and isinstance(part.get("text"), str):
        return part["text"], None
    if part_type not in MARKERS:
        raise RowError(f"a part of type {part_type!r:.40}; only text, images and videos are read")
    return MARKERS[part_type], next((part[key] for key in REFERENCE_KEYS if part.get(key)), None)


def _text(message: Mapping[str, Any]) -> str:
    """Returns the text of a system or assistant message. Raises RowError if it holds an image or video."""
    parts = [_part(part) for part in _parts(message)]
    if any(reference is not None or text in (MARKER, VIDEO_MARKER) for text, reference in parts):
        raise RowError("an image or video in a system or assistant message; only user messages may hold them")
    return "".join(text for text, _ in parts)

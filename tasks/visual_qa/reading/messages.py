"""Questions that are lists of messages, with role and content or with from and value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmrl.runtime.jsonl import RowError

MARKER, VIDEO_MARKER = "<image>", "<video>"
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
KINDS = {"image": MARKER, "image_url": MARKER, "input_image": MARKER, "video": VIDEO_MARKER, "video_url": VIDEO_MARKER}
TEXTS = ("text", "input_text")
REFERENCES = ("image", "image_url", "video", "video_url", "url", "path", "bytes")


@dataclass(frozen=True)
class ReadQuestion:
    """A question with markers in its text. images, videos: what stands at each marker; None: the next of the row's
    column. reply: of an assistant, in the last message."""

    text: str
    system: str | None = None
    images: tuple[Any, ...] = ()
    videos: tuple[Any, ...] = ()
    reply: str | None = None


def is_messages(value: object) -> bool:
    """Returns whether a value is a list of messages, well formed or not."""
    return isinstance(value, list | tuple) and bool(value) and isinstance(value[0], Mapping)


def read_messages(messages: Sequence[Any]) -> ReadQuestion:
    """Reads a system message, if any, a user's, and an assistant's reply, if any.

    Content is text, or a list of parts of type text, image or video, as OpenAI's API and chat templates have them; an
    image stands in its part, or is the next one of the row's column. Raises RowError for messages of another order.
    """
    roles = [_role(message, index) for index, message in enumerate(messages)]
    if roles not in (r := [["user"], ["system", "user"]]) and roles not in [[*one, "assistant"] for one in r]:
        raise RowError(
            f"messages of {', '.join(roles)}; a question is a user's message, after a system message or none; "
            "task.data.type=conversations reads whole conversations"
        )
    system = _text(messages[0]) if roles[0] == "system" else None
    reply = _text(messages[-1]) if roles[-1] == "assistant" else None
    question = messages[roles.index("user")]
    texts: list[str] = []
    shown: dict[str, list[Any]] = {MARKER: [], VIDEO_MARKER: []}
    for part in _parts(question):
        text, reference = _part(part)
        texts.append(text)
        for marker, references in shown.items():
            references += [reference] * text.count(marker) if reference is None else [reference] * (text == marker)
    return ReadQuestion("".join(texts), system, tuple(shown[MARKER]), tuple(shown[VIDEO_MARKER]), reply)


def filled(inside: Sequence[Any], column: Sequence[Any]) -> list[Any]:
    """Returns the images at all markers in their order, those of the column in place of None; those left follow."""
    rest = iter(column)
    return [next(rest, None) if one is None else one for one in inside] + list(rest)


def _role(message: object, index: int) -> str:
    """Returns the role of a message, in OpenAI's names. Raises RowError for an unknown one."""
    if not isinstance(message, Mapping):
        raise RowError(f"message {index} must be an object, not {type(message).__name__}")
    role = message.get("role") or message.get("from")
    if role not in ROLES:
        raise RowError(f"message {index}: role {role!r:.40} is not one of {', '.join(ROLES)}")
    return ROLES[role]


def _parts(message: Mapping[str, Any]) -> Sequence[Any]:
    content = message.get("content") if message.get("content") is not None else message.get("value")
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list | tuple):
        raise RowError(f"the content of a message must be text or a list of parts, not {type(content).__name__}")
    return content


def _part(part: Any) -> tuple[str, Any]:
    """Returns the text of a part, or its marker and what it shows."""
    if isinstance(part, str):
        return part, None
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind in TEXTS and isinstance(part.get("text"), str):
        return part["text"], None
    if kind not in KINDS:
        raise RowError(f"a part of type {kind!r:.40}; only text, images and videos are read")
    return KINDS[kind], next((part[key] for key in REFERENCES if part.get(key)), None)


def _text(message: Mapping[str, Any]) -> str:
    parts = [_part(part) for part in _parts(message)]
    if any(reference is not None or text in (MARKER, VIDEO_MARKER) for text, reference in parts):
        raise RowError("an image in a message that is not the user's")
    return "".join(text for text, _ in parts)

"""Demonstrated conversations from files and datasets: messages with images, calls of tools and their results."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from PIL import Image

from mmrl.rollouts import Message, Prompt
from mmrl.runtime.jsonl import RowError, check_value
from mmrl.tasks.data.image_files import ImageFiles
from mmrl.tasks.visual_qa.reading.messages import MARKER, VIDEO_MARKER

ROLES = ("system", "user", "assistant", "tool")
SHAREGPT = {"human": "user", "gpt": "assistant", "observation": "tool"}  # its names for roles
Part = str | Image.Image
_NAME = re.compile(r"[A-Za-z_]\w*")


def _with_role(message: object) -> object:
    """Returns a message with `role` and `content`, also for one with `from` and `value`."""
    if not isinstance(message, Mapping) or "role" in message or "from" not in message:
        return message
    return {"role": SHAREGPT.get(message["from"], message["from"]), "content": message.get("value")}


@dataclass(frozen=True)
class ConversationFields:
    """The fields of a row that is a whole conversation.

    `messages`: objects with `role` and `content`, or with `from` and `value` as LLaVA's; the content is text, or a
    list of {"type": "text", "text": ...} and {"type": "image"}. An image stands in its part (`image`, or
    `image_url` with a `url`), or in the field `images`, which fills the parts without one, and `<image>` in text,
    in order. What an assistant calls stands in `tool_calls`, as {"function": {"name", "arguments"}} or {"name",
    "arguments"}, arguments as an object or as its JSON; it becomes text of the response as `calls` says. `tools`:
    JSON schemas for the chat template, as a list or as its JSON. Columns of tables fill what a row lacks with
    nulls, so that a null counts as absent.

    answers: the field that a verifier compares with; without it, the text of the last message.
    """

    messages: str = "messages"
    images: str = "images"
    tools: str = "tools"
    answer: str = "answer"
    calls: Literal["json", "python"] = "json"
    tool_role: Literal["tool", "user"] = "tool"
    image_files: ImageFiles = ImageFiles()

    def prompt(self, row: Any, prompt_id: str) -> Prompt:
        """Returns the messages before the first response as the prompt; metadata: `demonstration`, every response's
        text; `observations`, the messages between two of them; and what the row holds besides.

        Raises RowError as `check`, and for an image that cannot be decoded.
        """
        parsed = self._read(row, self.image_files.decoded)
        first = next(index for index, message in enumerate(parsed) if message.role == "assistant")
        responses: list[str] = []
        between: list[list[Message]] = []
        for message in parsed[first:]:
            if message.role == "assistant":
                responses.append(message.text)
                between.append([])
            else:
                between[-1].append(message)
        prompt_messages = tuple(parsed[:first])
        used = (self.messages, self.images, self.tools, self.answer)
        rest = {key: value for key, value in row.items() if key not in used}
        return Prompt(
            id=prompt_id,
            text=prompt_messages[-1].text,
            answer=responses[-1] if row.get(self.answer) is None else row[self.answer],
            messages=prompt_messages,
            tools=self._schemas(row),
            metadata={
                **rest,
                "demonstration": responses,
                "observations": [tuple(messages) for messages in between[:-1]],
            },
        )

    def check(self, row: object) -> None:
        """Raises RowError for a row that is not a conversation that can be learned from, naming the field and the
        message."""
        self._read(row, self._checked_image)

    def _checked_image(self, image: object) -> Image.Image:
        self.image_files.check(image)
        return Image.new("L", (1, 1))

    def _read(self, row: object, open_image: Callable[[object], Image.Image]) -> list[Message]:
        if not isinstance(row, Mapping):
            raise RowError(f"a row must be an object, not {type(row).__name__}")
        for key, value in row.items():
            check_value(key, str(key))
            check_value(value, str(key))
        messages = row.get(self.messages)
        if not isinstance(messages, list | tuple) or not messages:
            fields = ", ".join(map(str, row)) or "none"
            raise RowError(
                f"field {self.messages!r} must be a list of messages (fields: {fields}); "
                "task.data.messages_field names another one"
            )
        self._schemas(row)
        images = row.get(self.images)
        shown = enumerate([] if images is None else images if isinstance(images, list | tuple) else [images])
        parsed, messages = [], [_with_role(message) for message in messages]
        for index, message in enumerate(messages):
            try:
                parsed.append(self._message(message, shown, open_image))
            except RowError as error:
                raise RowError(f"field {self.messages!r}, message {index}: {error}") from None
        self._check_order([message.get("role") for message in messages])
        if (left := len(list(shown))) > 0:
            raise RowError(f"field {self.images!r} has {left} images more than {self.messages!r} has places for them")
        return parsed

    def _check_order(self, roles: Sequence[str]) -> None:
        """Raises RowError for an order of roles that cannot be learned from."""
        field = f"field {self.messages!r}"
        if "assistant" not in roles:
            raise RowError(f"{field}: no message of an assistant, so there is nothing to learn")
        if roles[-1] != "assistant":
            raise RowError(f"{field}: the last message is the {roles[-1]}'s; it must be an assistant's")
        if roles[0] == "assistant" or roles[:2] == ["system", "assistant"]:
            raise RowError(f"{field}: the assistant's message comes first; a user's must come before it")
        for index, (one, other) in enumerate(zip(roles, roles[1:], strict=False), 1):
            if one == other == "assistant":
                raise RowError(f"{field}, message {index}: an assistant's after an assistant's; join the two")
            if other == "system":
                raise RowError(f"{field}, message {index}: a system message that is not the first")

    def _message(
        self, message: object, shown: Iterator[tuple[int, object]], open_image: Callable[[object], Image.Image]
    ) -> Message:
        """Reads one message of a row. Raises RowError for an unknown role, an empty message, and images or tool calls
        where they can not be."""
        if not isinstance(message, Mapping) or message.get("role") not in ROLES:
            role = message.get("role") if isinstance(message, Mapping) else type(message).__name__
            raise RowError(f"role must be one of {', '.join(ROLES)}, not {role!r:.40}")
        role = message["role"]
        parts = list(self._parts(message.get("content"), shown, open_image))
        if role == "assistant":
            if not all(isinstance(part, str) for part in parts):
                raise RowError("an image in an assistant's message, which is text alone")
            text = self._response("".join(map(str, parts)), message.get("tool_calls"))
            parts = [text] if text.strip() else []
        elif message.get("tool_calls"):
            raise RowError(f"tool_calls of the {role}; an assistant's are meant")
        if not parts:
            raise RowError("it is empty")
        return Message(self.tool_role if role == "tool" else role, tuple(parts))

    def _parts(
        self, content: Any, shown: Iterator[tuple[int, object]], open_image: Callable[[object], Image.Image]
    ) -> Iterator[Part]:
        for part in [content] if isinstance(content, str | Mapping) else content or []:
            if isinstance(part, str):
                yield from self._marked(part, shown, open_image)
                continue
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            if kind == "text":
                if not isinstance(part.get("text"), str):
                    raise RowError("a part of type text without the key text")
                if part["text"]:
                    yield part["text"]
            elif kind in ("image", "image_url"):
                image = part.get("image") or part.get("image_url") or part.get("url") or part.get("path")
                yield self._image("its image", image, open_image) if image else self._next(shown, open_image)
            else:
                raise RowError(f"a part of type {kind!r:.40}; only text and images are read")

    def _marked(
        self, text: str, shown: Iterator[tuple[int, object]], open_image: Callable[[object], Image.Image]
    ) -> Iterator[Part]:
        """Yields the parts of a text, with an image for each <image> in it. Raises RowError for <video>."""
        if VIDEO_MARKER in text:
            raise RowError(f"{VIDEO_MARKER} in a conversation, of which only text and images are read")
        for index, piece in enumerate(text.split(MARKER)):
            if index:
                yield self._next(shown, open_image)
            if piece:
                yield piece

    def _next(self, shown: Iterator[tuple[int, object]], open_image: Callable[[object], Image.Image]) -> Image.Image:
        """Returns the next image of the row's field of images."""
        number, one = next(shown, (0, None))
        if one is None:
            raise RowError(f"there is no image left for it in field {self.images!r}")
        return self._image(f"image {number} of field {self.images!r}", one, open_image)

    @staticmethod
    def _image(name: str, one: object, open_image: Callable[[object], Image.Image]) -> Image.Image:
        try:
            return open_image(one)
        except RowError as error:
            raise RowError(f"{name}: {error}") from None

    def _response(self, text: str, calls: object) -> str:
        """Returns a response's text with its calls at the end."""
        if not calls:
            return text
        if not isinstance(calls, list | tuple):
            raise RowError("tool_calls must be a list")
        written = [self._call(call) for call in calls]
        if self.calls == "python" and len(written) > 1:
            raise RowError("several tool_calls; task.data.calls=python writes one a message")
        return "\n".join([text, *written] if text else written)

    def _call(self, call: object) -> str:
        """Returns a tool call as the text that the assistant writes: Python or <tool_call> JSON. Raises RowError."""
        function = call.get("function") or call if isinstance(call, Mapping) else {}
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise RowError('a tool call is {"function": {"name": ..., "arguments": {...}}}')
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                raise RowError(f"the arguments of {name} are not JSON") from None
        if not isinstance(arguments, Mapping | None):
            raise RowError(f"the arguments of {name} are not an object")
        filled_arguments = filled(arguments or {})
        if self.calls == "python":
            return f"{name}({', '.join(f'{key}={value!r}' for key, value in filled_arguments.items())})"
        text = json.dumps({"name": name, "arguments": filled_arguments}, ensure_ascii=False)
        return f"<tool_call>\n{text}\n</tool_call>"

    def _schemas(self, row: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
        """Returns the JSON schemas of a row's tools. Raises RowError for anything else."""
        schemas = row.get(self.tools)
        if isinstance(schemas, str):
            try:
                schemas = json.loads(schemas)
            except (ValueError, RecursionError):
                raise RowError(f"field {self.tools!r} is not JSON") from None
        if schemas is None:
            return ()
        if not isinstance(schemas, list | tuple) or not all(isinstance(one, Mapping) for one in schemas):
            raise RowError(f"field {self.tools!r} must be a list of JSON schemas")
        return tuple(filled(one) for one in schemas)


def filled(value: Any) -> Any:
    """Returns a JSON value without its null entries."""
    if isinstance(value, Mapping):
        return {key: filled(inner) for key, inner in value.items() if inner is not None}
    return [filled(inner) for inner in value] if isinstance(value, list | tuple) else value

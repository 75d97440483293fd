"""Demonstrated conversations from files and datasets: messages with images, tool calls and their results."""

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
SHAREGPT = {"human": "user", "gpt": "assistant", "observation": "tool"}  # ShareGPT's names of roles
Part = str | Image.Image
_NAME = re.compile(r"[A-Za-z_]\w*")


def _with_role(message: object) -> object:
    """Converts a message with `from` and `value` (ShareGPT) to one with `role` and `content`. Returns any other
    message unchanged."""
    if not isinstance(message, Mapping) or "role" in message or "from" not in message:
        return message
    return {"role": SHAREGPT.get(message["from"], message["from"]), "content": message.get("value")}


@dataclass(frozen=True)
class ConversationFields:
    """The fields of a row that is a whole conversation.

    messages: the field of the messages: objects with `role` and `content`, or with `from` and `value` as LLaVA's. The
    content is text, or a list of {"type": "text", "text": ...} and {"type": "image"}. A part of type image holds its
    image (`image`, or `image_url` with a `url`). Parts without one, and each `<image>` in a text, take the next image
    of the field `images`.

    An assistant's tool calls are in `tool_calls`, as {"function": {"name", "arguments"}} or {"name", "arguments"},
    where arguments are an object or JSON. They become text of the response: `calls` says in which format. tool_role:
    the role that the chat template gets for results of tools. tools: the field of the JSON schemas of functions, a list
    or JSON. Null counts as absent, since tables fill missing values with nulls.

    answer: the field that a verifier compares responses with; if it is missing, the text of the last message is used.
    """

    messages: str = "messages"
    images: str = "images"
    tools: str = "tools"
    answer: str = "answer"
    calls: Literal["json", "python"] = "json"
    tool_role: Literal["tool", "user"] = "tool"
    image_files: ImageFiles = ImageFiles()

    def prompt(self, row: Any, prompt_id: str) -> Prompt:
        """Returns the messages before the assistant's first message as the prompt. Its answer is the field `answer` of
        the row, or the assistant's last message.

        Metadata: `demonstration`, the text of each assistant message; `observations`, for each but the last of these
        the messages that follow it; and all other fields of the row. Raises RowError as `check`, and if an image cannot
        be decoded.
        """
        parsed = self._read(row, self.image_files.decode)
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
        """Raises RowError, with the field and the message, if a row is not a conversation that can be trained on."""
        self._read(row, self._checked_image)

    def _checked_image(self, image: object) -> Image.Image:
        """Checks an image by its header, without decoding it. Returns a placeholder."""
        self.image_files.check(image)
        return Image.new("L", (1, 1))

    def _read(self, row: object, open_image: Callable[[object], Image.Image]) -> list[Message]:
        """Reads the messages of a row. open_image: decodes an image reference, or checks it and returns a placeholder.
        Raises RowError if the row is malformed."""
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
                "set task.data.messages_field to the right one"
            )
        self._schemas(row)
        images = row.get(self.images)
        if images is None:
            images = []
        image_column = enumerate(images if isinstance(images, list | tuple) else [images])
        parsed, messages = [], [_with_role(message) for message in messages]
        for index, message in enumerate(messages):
            try:
                parsed.append(self._message(message, image_column, open_image))
            except RowError as error:
                raise RowError(f"field {self.messages!r}, message {index}: {error}") from None
        self._check_order([message.get("role") for message in messages])
        if (left := len(list(image_column))) > 0:
            raise RowError(
                f"field {self.images!r} has {left} more images than {self.messages!r} has image markers; write "
                f"{MARKER} where each image belongs"
            )
        return parsed

    def _check_order(self, roles: Sequence[str]) -> None:
        """Raises RowError if a conversation with this order of roles cannot be trained on."""
        field = f"field {self.messages!r}"
        if "assistant" not in roles:
            raise RowError(f"{field}: no assistant message, so there is nothing to learn from")
        if roles[-1] != "assistant":
            raise RowError(f"{field}: the last message has the role {roles[-1]}; it must be an assistant message")
        if roles[0] == "assistant" or roles[:2] == ["system", "assistant"]:
            raise RowError(f"{field}: an assistant message comes first; put a user message before it")
        for index, (previous, role) in enumerate(zip(roles, roles[1:], strict=False), 1):
            if previous == role == "assistant":
                raise RowError(f"{field}, message {index}: follows another assistant message; join the two")
            if role == "system":
                raise RowError(f"{field}, message {index}: a system message must be the first message")

    def _message(
        self, message: object, image_column: Iterator[tuple[int, object]], open_image: Callable[[object], Image.Image]
    ) -> Message:
        """Reads one message of a row. image_column: the index and the value of each image in the row's column of images
        that is not used yet.

        Raises RowError for an unknown role, an empty message, and misplaced images or tool calls.
        """
        if not isinstance(message, Mapping) or message.get("role") not in ROLES:
            role = message.get("role") if isinstance(message, Mapping) else type(message).__name__
            raise RowError(f"role must be one of {', '.join(ROLES)}, not {role!r:.40}")
        role = message["role"]
        parts = list(self._parts(message.get("content"), image_column, open_image))
        if role == "assistant":
            if not all(isinstance(part, str) for part in parts):
                raise RowError("an assistant message has an image; it may hold text only")
            text = self._response("".join(map(str, parts)), message.get("tool_calls"))
            parts = [text] if text.strip() else []
        elif message.get("tool_calls"):
            raise RowError(f"a message of role {role} has tool_calls; only assistant messages may have them")
        if not parts:
            raise RowError("the message is empty")
        return Message(self.tool_role if role == "tool" else role, tuple(parts))

    def _parts(
        self, content: Any, image_column: Iterator[tuple[int, object]], open_image: Callable[[object], Image.Image]
    ) -> Iterator[Part]:
        """Yields the texts and images of a message's content: text, one part, or a list of either. A part without an
        image of its own stands for the next one of the row's column. Raises RowError for a part of another type."""
        for part in [content] if isinstance(content, str | Mapping) else content or []:
            if isinstance(part, str):
                yield from self._split_at_markers(part, image_column, open_image)
                continue
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            if kind == "text":
                if not isinstance(part.get("text"), str):
                    raise RowError("a part of type text without the key text")
                if part["text"]:
                    yield part["text"]
            elif kind in ("image", "image_url"):
                image = part.get("image") or part.get("image_url") or part.get("url") or part.get("path")
                if image:
                    yield self._open_image("its image", image, open_image)
                else:
                    yield self._next_image(image_column, open_image)
            else:
                raise RowError(f"a part of type {kind!r:.40}; only text and images are read")

    def _split_at_markers(
        self, text: str, image_column: Iterator[tuple[int, object]], open_image: Callable[[object], Image.Image]
    ) -> Iterator[Part]:
        """Yields the pieces of a text, with an image in place of each <image>. Raises RowError for <video>."""
        if VIDEO_MARKER in text:
            raise RowError(f"{VIDEO_MARKER} in a conversation; only text and images are read")
        for index, piece in enumerate(text.split(MARKER)):
            if index:
                yield self._next_image(image_column, open_image)
            if piece:
                yield piece

    def _next_image(
        self, image_column: Iterator[tuple[int, object]], open_image: Callable[[object], Image.Image]
    ) -> Image.Image:
        """Returns the next image of the row's column of images. Raises RowError if there is none left."""
        index, reference = next(image_column, (0, None))
        if reference is None:
            raise RowError(f"an image is missing: field {self.images!r} has fewer images than there are markers")
        return self._open_image(f"image {index} of field {self.images!r}", reference, open_image)

    @staticmethod
    def _open_image(name: str, reference: object, open_image: Callable[[object], Image.Image]) -> Image.Image:
        """Returns `open_image(reference)`. Its RowError is raised with the `name` of the image in front."""
        try:
            return open_image(reference)
        except RowError as error:
            raise RowError(f"{name}: {error}") from None

    def _response(self, text: str, calls: object) -> str:
        """Returns the text of an assistant message, followed by its tool calls as text."""
        if not calls:
            return text
        if not isinstance(calls, list | tuple):
            raise RowError("tool_calls must be a list")
        written = [self._call(call) for call in calls]
        if self.calls == "python" and len(written) > 1:
            raise RowError(
                "several tool_calls in one message; with task.data.calls=python only one is possible; keep one, or "
                "set it to json"
            )
        return "\n".join([text, *written] if text else written)

    def _call(self, call: object) -> str:
        """Returns a tool call as the text that the assistant writes, Python or <tool_call> JSON. Raises RowError if the
        call is malformed."""
        # the form of OpenAI's API, or only the object inside of "function"
        function = call.get("function") or call if isinstance(call, Mapping) else {}
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise RowError('malformed tool call; write {"function": {"name": ..., "arguments": {...}}}')
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                raise RowError(f"the arguments of the tool call {name} are not JSON") from None
        if not isinstance(arguments, Mapping | None):
            raise RowError(
                f"the arguments of the tool call {name} are not an object, {{...}}, but {type(arguments).__name__}"
            )
        given_arguments = without_nulls(arguments or {})
        if self.calls == "python":
            return f"{name}({', '.join(f'{key}={value!r}' for key, value in given_arguments.items())})"
        text = json.dumps({"name": name, "arguments": given_arguments}, ensure_ascii=False)
        return f"<tool_call>\n{text}\n</tool_call>"

    def _schemas(self, row: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
        """Returns the JSON schemas of a row's tools. Raises RowError if the field is not a list of objects."""
        schemas = row.get(self.tools)
        if isinstance(schemas, str):
            try:
                schemas = json.loads(schemas)
            except (ValueError, RecursionError):
                raise RowError(f"field {self.tools!r} is not JSON") from None
        if schemas is None:
            return ()
        if not isinstance(schemas, list | tuple) or not all(isinstance(schema, Mapping) for schema in schemas):
            raise RowError(f"field {self.tools!r} must be a list of JSON schemas")
        return tuple(without_nulls(schema) for schema in schemas)


def without_nulls(value: Any) -> Any:
    """Returns a JSON value without the keys whose value is null, at any depth."""
    if isinstance(value, Mapping):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list | tuple) else value

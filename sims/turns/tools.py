"""Tools: typed functions that a policy may call, and the environment that calls them."""

from __future__ import annotations

import ast
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from keyword import iskeyword
from types import MappingProxyType
from typing import Annotated, Any, Literal

from PIL import Image

from mmrl.errors import UserError, describe_error
from mmrl.rewards.parsing.responses import texts_between
from mmrl.rollouts import Message, Prompt, Video
from mmrl.sims.turns.environment import Environment, Reply

JSON_TYPES = {int: "integer", float: "number", str: "string", bool: "boolean"}
OPEN, CLOSE = "<tool_call>", "</tool_call>"
_FIRST_OF_A_NAME = re.compile("[A-Za-z_]")
SYSTEM = "You may call these functions before you answer:\n{tools}\n{how}"
HOW = {
    "json": 'A call is <tool_call>{"name": ..., "arguments": {...}}</tool_call>.',
    "python": "A call is an expression at the end of your response, such as name(1, 2).",
}


class ToolError(ValueError):
    """Raised for a call that cannot be executed. The policy gets the message."""


@dataclass
class Scene:
    """The images of a conversation, in the order in which the policy has seen them. Tools read them and add to them.

    whole: in their original size. shown: as the policy sees them.
    """

    whole: list[Image.Image] = field(default_factory=list)
    shown: list[Image.Image] = field(default_factory=list)
    coordinates: float | None = None  # each side of an image has this length; None: its number of pixels in `shown`
    facts: dict[str, Any] = field(default_factory=dict)  # what the current call adds to `Reply.facts`

    def image(self, number: int) -> Image.Image:
        """Returns an image in its original size; `number` counts from 0. Raises ToolError if there is none."""
        if not 0 <= number < len(self.whole):
            raise ToolError(f"there is no image {number}; there are {len(self.whole)}, counted from 0")
        return self.whole[number]

    def unit(self, x: float, y: float, number: int) -> tuple[float, float]:
        """Converts a point of an image from `coordinates` to fractions of its width and height."""
        width, height = self.shown[number].size if self.coordinates is None else (self.coordinates, self.coordinates)
        return x / width, y / height

    def show(self, whole: Image.Image, shown: Image.Image | None = None) -> Image.Image:
        """Adds an image, optionally with another version for the policy. Returns the version for the policy."""
        self.whole.append(whole)
        self.shown.append(whole if shown is None else shown)
        return self.shown[-1]


@dataclass(frozen=True)
class Tool:
    """A function that the policy may call. Its parameters have types; the environment passes those of type `Scene`. It
    returns text, an image, a number, or a list of these. The policy gets the messages of its exceptions."""

    name: str
    function: Callable[..., Any]
    schema: dict[str, Any]
    parameters: dict[str, tuple[Any, bool]]  # those that the policy gives: their types, and whether they are required
    scenes: list[str]  # the parameters of type `Scene`

    @classmethod
    def of(cls, function: Callable[..., Any], name: str | None = None) -> Tool:
        """Builds a tool from a function, with its docstring as description. Raises UserError if a parameter has no
        type, or one that JSON does not have."""
        name = name or function.__name__
        described = inspect.getdoc(function) or ""
        hints = typing.get_type_hints(function, include_extras=True)
        parameters = {
            key: (hints.get(key), parameter.default is parameter.empty)
            for key, parameter in inspect.signature(function).parameters.items()
            if hints.get(key) is not Scene
        }
        properties = {key: _schema(name, key, kind) for key, (kind, _) in parameters.items()}
        required = [key for key, (_, needed) in parameters.items() if needed]
        inner = {"type": "object", "properties": properties, "required": required}
        schema = {"name": name, "description": described.split("\n\n")[0], "parameters": inner}
        scenes = [key for key, kind in hints.items() if kind is Scene]
        return cls(name, function, {"type": "function", "function": schema}, parameters, scenes)

    def __call__(self, scene: Scene, positional: Sequence[Any], named: dict[str, Any]) -> tuple[str | Image.Image, ...]:
        """Calls the function. Returns the parts of a message: texts and images. Raises ToolError for wrong arguments,
        and whatever the function raises."""
        parameters = self.parameters
        arguments = dict(zip(parameters, positional, strict=False))
        if len(positional) > len(parameters) or arguments.keys() & named.keys() or named.keys() - parameters.keys():
            raise ToolError(f"{self.name} takes {', '.join(parameters) or 'nothing'}")
        arguments |= named
        if missing := [key for key, (_, needed) in parameters.items() if needed and key not in arguments]:
            raise ToolError(f"{self.name} needs {', '.join(missing)}")
        arguments = {key: _converted(self.name, key, parameters[key][0], value) for key, value in arguments.items()}
        return _parts(self.function(**arguments, **dict.fromkeys(self.scenes, scene)))


def _schema(tool: str, key: str, kind: Any) -> dict[str, Any]:
    """Returns the JSON schema of a tool's parameter `key` from its type annotation `kind`. Raises UserError for a type
    that is not supported."""
    if typing.get_origin(kind) is Annotated:
        inner, meaning, *_ = typing.get_args(kind)
        return {**_schema(tool, key, inner), "description": str(meaning)}
    if kind in JSON_TYPES:
        return {"type": JSON_TYPES[kind]}
    if typing.get_origin(kind) is list:
        return {"type": "array", "items": _schema(tool, key, typing.get_args(kind)[0])}
    if typing.get_origin(kind) is Literal:
        return {"type": "string", "enum": list(typing.get_args(kind))}
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return _schema(tool, key, next(k for k in typing.get_args(kind) if k is not type(None)))
    raise UserError(
        f"task.environment.tools: parameter {key} of the tool {tool} needs a type: int, float, str, bool, list[...] or "
        f"Literal[...], as in {key}: int"
    )


def _converted(tool: str, key: str, kind: Any, value: object) -> object:
    """Converts an argument to the type `kind`. Raises ToolError if the value does not have it."""
    if typing.get_origin(kind) is Annotated:
        return _converted(tool, key, typing.get_args(kind)[0], value)
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        options = typing.get_args(kind)
        return None if value is None else _converted(tool, key, next(k for k in options if k is not type(None)), value)
    if typing.get_origin(kind) is list and isinstance(value, list | tuple):
        return [_converted(tool, key, typing.get_args(kind)[0], item) for item in value]
    if typing.get_origin(kind) is Literal and value in typing.get_args(kind):
        return value
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if kind in (int, str, bool) and type(value) is kind:
        return value
    raise ToolError(f"{tool}: {key} cannot be {value!r:.80}")


def _parts(value: object) -> tuple[str | Image.Image, ...]:
    """Converts a tool's result to the parts of a message: texts and images. Raises TypeError for other types."""
    if isinstance(value, list | tuple):
        return tuple(part for one in value for part in _parts(one))
    if isinstance(value, str):  # lone surrogates, which JSON can hold, are replaced: tokenizers reject them
        return (value.encode(errors="replace").decode(),)
    if isinstance(value, Image.Image):
        return (value,)
    if isinstance(value, int | float):
        return (str(value),)
    raise TypeError(f"the tool must return text, an image, a number or a list of these, not {type(value).__name__}")


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool: its name, positional and named arguments."""

    name: str
    positional: list[Any]
    named: dict[str, Any]


def json_call(response: str) -> ToolCall | None:
    """Parses the last <tool_call> with JSON in a response; None if there is none. Raises ToolError if it is
    malformed."""
    calls = texts_between(response, OPEN, CLOSE)
    if not calls:
        return None
    try:
        call = json.loads(calls[-1])
    except (ValueError, RecursionError):
        raise ToolError("the call is not JSON") from None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise ToolError('a call is {"name": ..., "arguments": {...}}')
    named = call.get("arguments", {})
    if not isinstance(named, dict):
        raise ToolError("arguments must be an object")
    return ToolCall(call["name"], [], named)


def python_call(response: str) -> ToolCall | None:
    """Parses the Python call at the end of a response; None if there is none. Raises ToolError if its arguments are not
    literals."""
    text = response.rstrip()
    opening = text.rfind("(")
    name = _name_before(text, opening) if opening >= 0 and text.find(")", opening) == len(text) - 1 else ""
    if not name or iskeyword(name):  # as in "it is not (3)"
        return None
    try:
        call = ast.parse(name + text[opening:], mode="eval").body
        assert isinstance(call, ast.Call)
        named = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
        return ToolCall(name, [ast.literal_eval(value) for value in call.args], named)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):  # TypeError: {[]} can not be hashed
        raise ToolError("the arguments of the call cannot be read") from None


def _name_before(text: str, end: int) -> str:
    """Returns the Python name that ends at the position `end`; "" if there is none. A regular expression would take
    quadratic time."""
    begin = end
    while begin > 0 and (text[begin - 1].isalnum() or text[begin - 1] == "_"):
        begin -= 1
    first = _FIRST_OF_A_NAME.search(text, begin, end)
    return "" if first is None else text[first.start() : end]


READERS: dict[str, Callable[[str], ToolCall | None]] = {"json": json_call, "python": python_call}


class ToolEnvironment(Environment):
    """An environment that executes tool calls. A response without a call is the answer and ends the conversation. The
    message of a failed call is the observation, and the error of its turn."""

    def __init__(
        self,
        tools: Sequence[Tool],
        *,
        rewards: Mapping[str, float] = MappingProxyType({}),
        calls: Literal["json", "python"] = "json",
        described: Literal["template", "system", "no"] = "system",
        coordinates: float | None = None,
        shown_pixels: int | None = None,
    ) -> None:
        """rewards: from the name of a tool to the reward of a turn with a successful call; default: 0. Others: see
        `ToolsSettings`."""
        self._tools, self._rewards = {tool.name: tool for tool in tools}, rewards
        self._calls, self._described, self._shown_pixels = calls, described, shown_pixels
        self._scene = Scene(coordinates=coordinates)

    def tools(self) -> Sequence[dict[str, Any]]:
        return [tool.schema for tool in self._tools.values()] if self._described == "template" else ()

    def start(self, prompt: Prompt) -> Sequence[Message]:
        """Returns the prompt's messages, with images in the size that the policy sees, and the tools described in the
        system message if `described` says so."""
        messages = [replace(m, parts=tuple(map(self._shown, m.parts))) for m in prompt.messages]
        if self._described == "system":
            listed = "\n".join(json.dumps(tool.schema) for tool in self._tools.values())
            messages = _with_system(messages, SYSTEM.format(tools=listed, how=HOW[self._calls]))
        return messages

    def step(self, response: str) -> Reply:
        """Executes the tool call of a response. A response without a call ends the conversation; a call that fails is
        answered by its error."""
        try:
            call = READERS[self._calls](response)
        except ToolError as error:
            return self._failed(None, str(error))
        if call is None:
            return Reply(end=True)
        tool = self._tools.get(call.name)
        if tool is None:
            return self._failed(None, f"there is no function {call.name!r:.40}; there are {', '.join(self._tools)}")
        self._scene.facts = {}
        try:
            parts = tool(self._scene, call.positional, call.named)
        except ToolError as error:
            return self._failed(tool.name, str(error))
        except Exception as error:  # a user's tool may raise anything: the policy gets the message
            return self._failed(tool.name, describe_error(error))
        reward = self._rewards.get(tool.name, 0.0)
        return Reply((Message("user", parts),), reward=reward, tool=tool.name, facts=self._scene.facts)

    def _failed(self, tool: str | None, why: str) -> Reply:
        """Returns the reply to a call that failed: the policy reads the reason."""
        return Reply((Message("user", (f"error: {why}",)),), tool=tool, error=why)

    def _shown(self, part: str | Image.Image | Video) -> str | Image.Image | Video:
        """Adds an image of the prompt to the scene. Returns the part as the policy sees it."""
        if isinstance(part, str | Video):
            return part
        return self._scene.show(part, part if self._shown_pixels is None else fitted(part, self._shown_pixels))


def _with_system(messages: Sequence[Message], text: str) -> list[Message]:
    """Returns messages with `text` added to the system message, or as a new system message."""
    if messages and messages[0].role == "system":
        return [replace(messages[0], parts=(*messages[0].parts, f"\n{text}")), *messages[1:]]
    return [Message("system", (text,)), *messages]


def fitted(image: Image.Image, pixels: int) -> Image.Image:
    """Returns an image reduced to at most `pixels` pixels, with the same aspect ratio."""
    width, height = image.size
    if width * height <= pixels:
        return image
    scale = (pixels / (width * height)) ** 0.5
    size = (max(1, int(width * scale + 1e-6)), max(1, int(height * scale + 1e-6)))
    return image.resize(size, Image.Resampling.BOX)

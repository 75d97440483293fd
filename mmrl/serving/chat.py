"""An endpoint of OpenAI's protocol for a policy that answers in text: POST /v1/chat/completions, GET /v1/models.

Requests are answered one at a time by the policy's own sampler, as in an evaluation. For many callers start vLLM on the
weights that a run left: its final/ is an ordinary folder of transformers.
"""

from __future__ import annotations

import hmac
import json
import logging
import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any, Protocol

from mmrl.errors import UserError
from mmrl.rollouts import Message, Prompt, Rollouts
from mmrl.runtime.jsonl import RowError
from mmrl.tasks.data.image_files import ImageFiles

MAX_BYTES = 64 << 20  # of a request
MAX_CHOICES = 64
SILENT_S = 120  # a connection may be silent
ROLES = ("system", "developer", "user", "assistant", "tool")
_UNSUPPORTED = ("tools", "functions", "stop", "logprobs", "response_format")
_log = logging.getLogger(__name__)


class ChatPolicy(Protocol):
    """A policy whose responses to prompts are text."""

    evaluation_temperature: float

    def rollout(
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        seeds: Sequence[int],
        *,
        temperature: float | None = None,
        max_response_length: int | None = None,
    ) -> Rollouts: ...


@dataclass(frozen=True)
class ChatRequest:
    """A request as the policy gets it. limit: tokens of a response."""

    prompt: Prompt
    choices: int
    temperature: float
    limit: int
    seed: int


class BadRequest(ValueError):
    """A request that cannot be answered; the text says why. status: of HTTP."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status


class ChatServer(ThreadingHTTPServer):
    """Serves `policy` under the name `model` until `shutdown`. longest: tokens that a response may have. key: callers
    have to send it as a bearer token; None: anybody who reaches the address is answered."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self, policy: ChatPolicy, model: str, longest: int, *, host: str, port: int, key: str | None = None
    ) -> None:
        self.policy, self.model, self.longest, self.key = policy, model, longest, key
        self._one_at_a_time, self._numbers = threading.Lock(), count(1)
        super().__init__((host, port), ChatHandler)

    def complete(self, body: bytes) -> dict[str, Any]:
        """Returns the answer to a request. Raises BadRequest for one that cannot be answered."""
        request = self.read(body)
        seeds = [request.seed + i for i in range(request.choices)]
        with self._one_at_a_time:
            try:
                rollouts = self.policy.rollout(
                    [request.prompt],
                    request.choices,
                    seeds,
                    temperature=request.temperature,
                    max_response_length=request.limit,
                )
            except UserError as error:
                raise BadRequest(str(error)) from None
        choices = [
            {
                "index": i,
                "message": {"role": "assistant", "content": sample.response},
                "finish_reason": "length" if sample.truncated else "stop",
                "logprobs": None,
            }
            for i, sample in enumerate(rollouts.samples)
        ]
        return {
            "id": request.prompt.id,
            "object": "chat.completion",
            "created": int(time.time()),
            "model": self.model,
            "choices": choices,
        }

    def read(self, body: bytes) -> ChatRequest:
        """Reads a request. Raises BadRequest, which names the field."""
        try:
            fields = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"the request is not JSON: {error}") from None
        if not isinstance(fields, dict):
            raise BadRequest("the request is not a JSON object")
        if fields.get("stream"):
            raise BadRequest("stream: answers come whole; leave it out")
        unsupported = [name for name in _UNSUPPORTED if fields.get(name)]
        if unsupported:
            raise BadRequest(f"{unsupported[0]} is not supported; start vLLM on the run's final/ for it")
        if fields.get("model", self.model) != self.model:
            raise BadRequest(f"there is no model {fields['model']!r} here, only {self.model!r}", 404)
        limit = fields.get("max_completion_tokens") or fields.get("max_tokens") or self.longest
        seed = fields.get("seed")
        number = f"chatcmpl-{next(self._numbers)}"
        return ChatRequest(
            Prompt(number, "", messages=read_messages(fields.get("messages"))),
            int(_number("n", fields.get("n") or 1, 1, MAX_CHOICES)),
            _number("temperature", fields.get("temperature", self.policy.evaluation_temperature), 0, 10),
            int(_number("max_tokens", limit, 1, self.longest)),
            zlib.crc32(number.encode()) if seed is None else int(_number("seed", seed, 0, 2**62)),
        )


def read_messages(messages: object) -> tuple[Message, ...]:
    """Reads the messages of a request. An image is a `data:` URL; nothing is fetched. Raises BadRequest."""
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages: a list of at least one message is needed")
    read = tuple(_message(f"messages[{i}]", message) for i, message in enumerate(messages))
    if read[-1].role not in ("user", "tool"):
        raise BadRequest(f"messages: the last one is of the {read[-1].role}, so there is nothing to answer")
    return read


def _message(where: str, message: object) -> Message:
    """Parses one message of a chat request. where: its place in the request, for errors. Raises BadRequest."""
    if not isinstance(message, Mapping) or message.get("role") not in ROLES:
        raise BadRequest(f"{where}: expected an object with a role of {', '.join(ROLES)}")
    role = "system" if message["role"] == "developer" else str(message["role"])
    content = message.get("content")
    if isinstance(content, str):
        return Message(role, (content,))
    if not isinstance(content, list):
        raise BadRequest(f"{where}.content: expected a string or a list of parts")
    return Message(role, tuple(_part(f"{where}.content[{i}]", part) for i, part in enumerate(content)))


def _part(where: str, part: object) -> Any:
    """Parses a part of a message: text, or an image as a data: URL. Raises BadRequest."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if isinstance(part, Mapping) and kind == "text" and isinstance(part.get("text"), str):
        return part["text"]
    if not isinstance(part, Mapping) or kind != "image_url":
        raise BadRequest(f"{where}: expected a part of type text or image_url")
    url = part.get("image_url")
    url = url.get("url") if isinstance(url, Mapping) else url
    if not isinstance(url, str) or not url.startswith("data:"):
        raise BadRequest(f"{where}: an image is a data: URL, as data:image/png;base64,...; nothing is fetched")
    try:
        return ImageFiles().decode(url)
    except RowError as error:
        raise BadRequest(f"{where}: {error}") from None


def _number(name: str, value: object, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise BadRequest(f"{name} must be a number from {low:g} to {high:g}, not {value!r:.80}")
    return value


class ChatHandler(BaseHTTPRequestHandler):
    """Answers the two paths of the protocol."""

    server: ChatServer
    timeout = SILENT_S

    def do_GET(self) -> None:
        self._send(*self._checked(lambda: self._models()))

    def do_POST(self) -> None:
        self._send(*self._checked(lambda: self._completion()))

    def _checked(self, answer: Any) -> tuple[int, dict[str, Any]]:
        try:
            self._authorise()
            return 200, answer()
        except BadRequest as error:
            return error.status, {"error": {"message": str(error), "type": "invalid_request_error"}}
        except Exception as error:  # it is reported to the caller, and the server goes on
            _log.exception("the request failed")
            return 500, {"error": {"message": repr(error), "type": "server_error"}}

    def _authorise(self) -> None:
        """Raises BadRequest for a caller without the key, and for a page elsewhere that makes a browser ask."""
        if self.headers.get("Origin") is not None:
            raise BadRequest("pages of browsers are not answered", 403)
        sent = (self.headers.get("Authorization") or "").encode()
        if self.server.key is not None and not hmac.compare_digest(sent, f"Bearer {self.server.key}".encode()):
            raise BadRequest("the key is missing or wrong: Authorization: Bearer KEY", 401)

    def _models(self) -> dict[str, Any]:
        if self.path.rstrip("/") != "/v1/models":
            raise BadRequest(f"there is no {self.path}; use GET /v1/models or POST /v1/chat/completions", 404)
        model = {"id": self.server.model, "object": "model", "created": 0, "owned_by": "mmrl"}
        return {"object": "list", "data": [model]}

    def _completion(self) -> dict[str, Any]:
        if self.path.rstrip("/") != "/v1/chat/completions":
            raise BadRequest(f"there is no {self.path}; use GET /v1/models or POST /v1/chat/completions", 404)
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            raise BadRequest("Content-Length is missing", 411)
        if int(length) > MAX_BYTES:
            raise BadRequest(f"{length} bytes; at most {MAX_BYTES} are accepted", 413)
        return self.server.complete(self.rfile.read(int(length)))

    def _send(self, status: int, answer: dict[str, Any]) -> None:
        """Sends a JSON answer; after an error the connection is closed."""
        text = json.dumps(answer).encode()
        self.close_connection |= status != 200  # the unread rest of a refused request would be taken for the next one
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *arguments: object) -> None:
        _log.debug(format, *arguments)


def serve(policy: ChatPolicy, model: str, longest: int, *, host: str, port: int, key: str | None) -> None:
    """Serves a policy until Ctrl-C. Raises UserError for an address that is in use or not this machine's."""
    try:
        server = ChatServer(policy, model, longest, host=host, port=port, key=key)
    except OSError as error:
        raise UserError(f"{host}:{port} can not be listened at: {error}") from None
    with server:
        print(f"http://{host}:{server.server_port}/v1 answers as {model!r}; Ctrl-C ends it", flush=True)
        server.serve_forever()

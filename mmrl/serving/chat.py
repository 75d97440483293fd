"""An endpoint of OpenAI's protocol for a policy that answers in text: POST /v1/chat/completions, GET /v1/models.

Requests are answered one at a time by the policy's own sampler, as in an evaluation. For many clients start vLLM on the
run's final/, which is an ordinary folder of transformers.
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
MAX_CHOICES = 64  # responses to one request
IDLE_TIMEOUT_S = 120  # an idle connection is closed after it
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
    """A parsed request. choices: the number of responses. limit: the maximum number of tokens of each."""

    prompt: Prompt
    choices: int
    temperature: float
    limit: int
    seed: int


class BadRequest(ValueError):
    """A request that cannot be answered. text: the reason, for the client. status: the HTTP status."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status


class ChatServer(ThreadingHTTPServer):
    """Serves `policy` under the name `model` until `shutdown`.

    max_tokens: the limit of a response. key: the bearer token that clients have to send; None: no token is needed.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self, policy: ChatPolicy, model: str, max_tokens: int, *, host: str, port: int, key: str | None = None
    ) -> None:
        self.policy, self.model, self.max_tokens, self.key = policy, model, max_tokens, key
        self._policy_lock, self._request_numbers = threading.Lock(), count(1)
        super().__init__((host, port), ChatHandler)

    def complete(self, body: bytes) -> dict[str, Any]:
        """Answers a request: returns the fields of a chat completion. Raises BadRequest if it cannot be answered."""
        request = self.parse_request(body)
        seeds = [request.seed + i for i in range(request.choices)]
        with self._policy_lock:
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

    def parse_request(self, body: bytes) -> ChatRequest:
        """Parses the JSON body of a request. Raises BadRequest, which names the field, if it is invalid."""
        try:
            fields = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"the request is not JSON: {error}") from None
        if not isinstance(fields, dict):
            raise BadRequest("the request is not a JSON object")
        if fields.get("stream"):
            raise BadRequest("stream: streaming is not supported; leave it out")
        unsupported = [name for name in _UNSUPPORTED if fields.get(name)]
        if unsupported:
            raise BadRequest(f"{unsupported[0]} is not supported; start vLLM on the run's final/ for it")
        if fields.get("model", self.model) != self.model:
            raise BadRequest(f"there is no model {fields['model']!r} here, only {self.model!r}", 404)
        limit = fields.get("max_completion_tokens") or fields.get("max_tokens") or self.max_tokens
        seed = fields.get("seed")
        request_id = f"chatcmpl-{next(self._request_numbers)}"
        return ChatRequest(
            Prompt(request_id, "", messages=parse_messages(fields.get("messages"))),
            int(_number("n", fields.get("n") or 1, 1, MAX_CHOICES)),
            _number("temperature", fields.get("temperature", self.policy.evaluation_temperature), 0, 10),
            int(_number("max_tokens", limit, 1, self.max_tokens)),
            zlib.crc32(request_id.encode()) if seed is None else int(_number("seed", seed, 0, 2**62)),
        )


def parse_messages(messages: object) -> tuple[Message, ...]:
    """Parses the messages of a request. Raises BadRequest if one is invalid, or the last is not from a user or tool."""
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages: a list of at least one message is needed")
    parsed = tuple(_parse_message(f"messages[{i}]", message) for i, message in enumerate(messages))
    if parsed[-1].role not in ("user", "tool"):
        raise BadRequest(f"messages: the last one has the role {parsed[-1].role}; it must be of a user or a tool")
    return parsed


def _parse_message(location: str, message: object) -> Message:
    """Parses one message. location: its path in the request, for errors. Raises BadRequest if it is invalid."""
    if not isinstance(message, Mapping) or message.get("role") not in ROLES:
        raise BadRequest(f"{location}: expected an object with a role of {', '.join(ROLES)}")
    role = "system" if message["role"] == "developer" else str(message["role"])
    content = message.get("content")
    if isinstance(content, str):
        return Message(role, (content,))
    if not isinstance(content, list):
        raise BadRequest(f"{location}.content: expected a string or a list of parts")
    return Message(role, tuple(_parse_part(f"{location}.content[{i}]", part) for i, part in enumerate(content)))


def _parse_part(location: str, part: object) -> Any:
    """Parses a part of a message: text, or an image as a `data:` URL. No other URL is fetched. Raises BadRequest if it
    is neither."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if isinstance(part, Mapping) and kind == "text" and isinstance(part.get("text"), str):
        return part["text"]
    if not isinstance(part, Mapping) or kind != "image_url":
        raise BadRequest(f"{location}: expected a part of type text or image_url")
    url = part.get("image_url")
    url = url.get("url") if isinstance(url, Mapping) else url
    if not isinstance(url, str) or not url.startswith("data:"):
        raise BadRequest(f"{location}: send the image as a data: URL, data:image/png;base64,...; nothing is fetched")
    try:
        return ImageFiles().decode(url)
    except RowError as error:
        raise BadRequest(f"{location}: {error}") from None


def _number(name: str, value: object, low: float, high: float) -> float:
    """Returns the value of the field `name`. Raises BadRequest if it is not a number from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise BadRequest(f"{name} must be a number from {low:g} to {high:g}, not {value!r:.80}")
    return value


class ChatHandler(BaseHTTPRequestHandler):
    """Handles the requests of one connection: GET /v1/models and POST /v1/chat/completions."""

    server: ChatServer
    timeout = IDLE_TIMEOUT_S

    def do_GET(self) -> None:
        self._send(*self._handle(lambda: self._models()))

    def do_POST(self) -> None:
        self._send(*self._handle(lambda: self._completion()))

    def _handle(self, answer: Any) -> tuple[int, dict[str, Any]]:
        """Returns the HTTP status, and the result of `answer()` or the error that it raised, as JSON fields."""
        try:
            self._authorise()
            return 200, answer()
        except BadRequest as error:
            return error.status, {"error": {"message": str(error), "type": "invalid_request_error"}}
        except Exception as error:  # the client gets the error, and the server continues
            _log.exception("the request failed")
            return 500, {"error": {"message": repr(error), "type": "server_error"}}

    def _authorise(self) -> None:
        """Raises BadRequest for a client without the key, and for requests of web pages, which a browser sends."""
        if self.headers.get("Origin") is not None:
            raise BadRequest("requests of web pages (with an Origin header) are not answered", 403)
        header = (self.headers.get("Authorization") or "").encode()
        if self.server.key is not None and not hmac.compare_digest(header, f"Bearer {self.server.key}".encode()):
            raise BadRequest("the key is missing or wrong: Authorization: Bearer KEY", 401)

    def _models(self) -> dict[str, Any]:
        """Returns the fields of the answer to GET /v1/models. Raises BadRequest for another path."""
        if self.path.rstrip("/") != "/v1/models":
            raise BadRequest(f"there is no {self.path}; use GET /v1/models or POST /v1/chat/completions", 404)
        model = {"id": self.server.model, "object": "model", "created": 0, "owned_by": "mmrl"}
        return {"object": "list", "data": [model]}

    def _completion(self) -> dict[str, Any]:
        """Returns the fields of the answer to POST /v1/chat/completions. Raises BadRequest for another path, a missing
        length, and a body that is too long."""
        if self.path.rstrip("/") != "/v1/chat/completions":
            raise BadRequest(f"there is no {self.path}; use GET /v1/models or POST /v1/chat/completions", 404)
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            raise BadRequest("Content-Length is missing", 411)
        if int(length) > MAX_BYTES:
            raise BadRequest(f"{length} bytes; at most {MAX_BYTES} are accepted", 413)
        return self.server.complete(self.rfile.read(int(length)))

    def _send(self, status: int, answer: dict[str, Any]) -> None:
        """Sends `answer` as JSON. After an error the connection is closed."""
        text = json.dumps(answer).encode()
        self.close_connection |= status != 200  # the unread rest of a refused request would be taken for the next one
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *arguments: object) -> None:
        _log.debug(format, *arguments)


def serve(policy: ChatPolicy, model: str, max_tokens: int, *, host: str, port: int, key: str | None) -> None:
    """Serves a policy until Ctrl-C, see `ChatServer`. Raises UserError if the address is in use or not this
    machine's."""
    try:
        server = ChatServer(policy, model, max_tokens, host=host, port=port, key=key)
    except OSError as error:
        raise UserError(f"cannot listen at {host}:{port}: {error}; choose another --host or --port") from None
    with server:
        print(f"http://{host}:{server.server_port}/v1 serves {model!r}; Ctrl-C ends it", flush=True)
        server.serve_forever()

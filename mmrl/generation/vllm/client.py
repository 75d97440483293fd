"""A client of one vLLM server: it sends weights and requests over HTTP."""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests
import urllib3
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection

from mmrl.errors import UserError
from mmrl.generation.vllm.api_key import KEY
from mmrl.runtime.timed_calls import TimeLimit, call_in_time

PAUSE, LONGEST_PAUSE = 0.5, 5.0  # seconds between two attempts: the first pause, and the longest one
ATTEMPTS = 3  # maximum attempts of a request that a running server fails to answer
LOST = requests.RequestException  # raised when a server does not answer, or has ended
SILENCE_S = 60  # seconds without any packet from a host, after which connections to it are closed
MAX_ANSWER = 2**30  # bytes
Step = tuple[str, Callable[[], Any]]  # (what the server must do, as messages say it; the call)


class Failed(requests.ConnectionError):
    """Raised when a running server reports that it could not handle a request."""


@dataclass(frozen=True)
class EngineWeights:
    """The weights that engines should have. base: the name of the version in `folder`. adapter: a LoRA's folder."""

    base: str
    folder: Path
    adapter: Path | None = None

    @property
    def version(self) -> str:
        return self.base if self.adapter is None else f"{self.base}.{self.adapter.name}"


SendWeights = Callable[["Server", EngineWeights], None]  # raises LOST, which may be tried again, and UserError


class KeepaliveAdapter(HTTPAdapter):
    """An HTTP adapter with TCP keepalive: connections end when the other host no longer answers on the network. A read
    timeout could not detect that, since a response may take long."""

    def init_poolmanager(self, *arguments: Any, **options: Any) -> None:
        """Sets the keepalive options of all sockets: probes every SILENCE_S / 4 seconds, and an end after SILENCE_S."""
        socket_options = [*HTTPConnection.default_socket_options, (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
        if sys.platform == "linux":  # other systems keep their own timeout
            tcp, probe = socket.IPPROTO_TCP, SILENCE_S // 4
            socket_options += [(tcp, socket.TCP_KEEPIDLE, probe), (tcp, socket.TCP_KEEPINTVL, probe)]
            socket_options += [(tcp, socket.TCP_USER_TIMEOUT, 1000 * SILENCE_S)]
        super().init_poolmanager(*arguments, socket_options=socket_options, **options)


@dataclass
class Bearer(requests.auth.AuthBase):
    """Authentication of requests by an API key."""

    key: str

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        request.headers["Authorization"] = f"Bearer {self.key}"
        return request


def keepalive_session() -> requests.Session:
    """Returns an HTTP session with TCP keepalive."""
    session = requests.Session()
    for scheme in ("http://", "https://"):
        session.mount(scheme, KeepaliveAdapter(pool_maxsize=1024))  # more than ever are in flight to one engine
    return session


@dataclass
class Server:
    """A client of one engine.

    get_address: returns its address, which may change when it is restarted. suspect: whether it failed, so that its
    weights must be refreshed before the next request. failures: number of errors of the running server since its last
    answer.
    """

    get_address: Callable[[], str]
    timeout: float  # seconds
    key: str = field(default="", repr=False)
    suspect: bool = False
    failures: int = 0
    retry_at: float = 0.0  # the end of the pause, in seconds of time.monotonic
    lock: threading.Lock = field(default_factory=threading.Lock)
    session: requests.Session = field(default_factory=keepalive_session)

    @property
    def address(self) -> str:
        return self.get_address()

    def failed(self, *, runs: bool) -> None:
        """Records a failure and starts a pause without requests, longer each time. Failures during a pause belong to
        requests from before it and are not counted. runs: whether the server still runs; only then does the
        number of failures grow."""
        self.suspect = True
        if not self.is_paused():
            self.failures += runs
            self.retry_at = time.monotonic() + min(PAUSE * 2 ** max(0, self.failures - 1), LONGEST_PAUSE)

    def is_paused(self) -> bool:
        """Returns whether no requests are sent now, after a failure."""
        return time.monotonic() < self.retry_at

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Posts a request and returns the JSON of its answer. Raises LOST if there is no answer, UserError if the
        server refuses it."""
        return self._exchange("POST", path, body)

    def version(self) -> str:
        """Returns the version of the weights that the server has. Raises LOST or UserError."""
        info = self._exchange("GET", "weight_info")
        if not isinstance(info, dict) or not isinstance(info.get("weight_version"), str):
            raise Failed(f"/weight_info gives no version: {str(info)[:100]}")
        return info["weight_version"]

    def _exchange(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Sends a request and returns the JSON of the answer, {} for plain text. Raises requests.Timeout if all of it
        takes longer than `timeout`; the timeout of `requests` bounds each wait for bytes only."""
        try:
            status, content_type, text = call_in_time(lambda: self._send(method, path, body), self.timeout)
        except TimeLimit:
            raise requests.Timeout(f"the answer was not complete after {self.timeout:g} s") from None
        text = self._read(status, text, path)
        return _parse_json(text) if "json" in content_type else {}  # some paths answer in plain text

    def _send(self, method: str, path: str, body: dict[str, Any] | None) -> tuple[int, str, str]:
        """Sends a request. Returns status, content type and text of the answer."""
        auth = Bearer(self.key) if self.key else None
        options: dict[str, Any] = {"timeout": self.timeout, "stream": True, "allow_redirects": False}
        with self.session.request(method, f"{self.address}/{path}", json=body, auth=auth, **options) as answer:
            return answer.status_code, answer.headers.get("content-type", ""), _text(answer)

    def _read(self, status: int, text: str, path: str) -> str:
        """Returns the text of an answer. Raises Failed, LOST or UserError if its status says that it is an error."""
        message = " ".join(text.split())[:300]
        if status >= 500:
            raise Failed(f"{status} {message}")
        if status == 401:
            raise UserError(
                f"the vLLM server at {self.address} asks for an API key; set the environment variable {KEY} to the key "
                "that it was started with"
            )
        if status == 404 and "does not exist" in text:  # the LoRA: the server was restarted and has none
            raise requests.ConnectionError(message)
        if status == 404 and '"error"' not in text:  # no such path
            more = ", VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora" if "lora" in path else ""
            raise UserError(
                f"the vLLM server at {self.address} has no /{path}; start it with VLLM_SERVER_DEV_MODE=1 in its "
                "environment and --enable-scale-out --logprobs-mode processed_logprobs --generation-config vllm "
                f"--worker-extension-cls mmrl.generation.weight_sync.receiver.Arrival{more}"
            )
        if status >= 300:
            raise UserError(f"the vLLM server at {self.address} refuses /{path}: {status} {message}")
        return text

    def refresh(
        self, weights: EngineWeights, send_weights: SendWeights, alive: Callable[[], bool] = lambda: True
    ) -> None:
        """Waits until the server answers, and sends it the weights by `send_weights` unless it has that version.

        alive: returns whether the server may still answer. Raises UserError if it does not answer within `timeout`,
        fails ATTEMPTS times, or is no longer alive.
        """
        self._retry(lambda: self._steps(self.version(), weights, send_weights), alive)
        self.suspect = False

    def ask(self, method: str, alive: Callable[[], bool] = lambda: True) -> list[Any]:
        """Waits until the server answers, calls a method without arguments in each process of the engine, and returns
        their results. Raises UserError like `refresh`."""
        results: list[Any] = []
        self._retry(lambda: iter([("answer", lambda: results.extend(self.call(method)["results"]))]), alive)
        return results

    def _retry(self, steps: Callable[[], Iterator[Step]], alive: Callable[[], bool]) -> None:
        """Repeats all steps until they succeed. Raises UserError after `timeout` seconds, after ATTEMPTS failures of a
        running server, and if it is no longer alive."""
        deadline, failures, pause = time.monotonic() + self.timeout, 0, PAUSE
        action, last = "answer", "no answer"
        with self.lock:
            while alive() and time.monotonic() < deadline and failures < ATTEMPTS:
                try:
                    action = "answer"
                    for step in steps():
                        action, run = step  # what it does, for messages, and the function that does it
                        run()
                    return
                except LOST as error:
                    failures += isinstance(error, Failed)
                    last = " ".join(str(error).split())[-200:]
                    time.sleep(pause)
                    pause = min(2 * pause, LONGEST_PAUSE)
        if failures < ATTEMPTS and alive():
            raise UserError(
                f"the vLLM server at {self.address} did not {action} within rollout.generator.timeout={self.timeout:g} "
                f"s ({last}); check that it is running and that the address is right"
            )
        how = f"failed {failures} times to {action}" if failures == ATTEMPTS else f"ended before it could {action}"
        raise UserError(f"the vLLM server at {self.address} {how} ({last}); see the server's log")

    def _steps(self, old: str, weights: EngineWeights, send_weights: SendWeights) -> Iterator[Step]:
        """Yields the steps that bring the server from the version `old` of weights to `weights`."""
        base, _, adapter = old.partition(".")  # a version is BASE, or BASE.ADAPTER with a LoRA
        if old == weights.version:
            return
        if base != weights.base:
            yield "take the weights", lambda: send_weights(self, weights)
        if weights.adapter is not None:
            lora = {"lora_name": weights.version, "lora_path": str(weights.adapter), "load_inplace": True}
            yield "take the LoRA", lambda: self.post("v1/load_lora_adapter", lora)
            if adapter:
                yield "unload the last LoRA", lambda: self.post("v1/unload_lora_adapter", {"lora_name": old})
        yield "empty its caches", self.empty_caches
        yield "name its weights", lambda: self.post("update_weight_version", {"new_version": weights.version})

    def call(self, method: str, **arguments: Any) -> Any:
        """Calls a method of `mmrl.generation.weight_sync.receiver.Arrival` in each process of the engine."""
        return self.post("collective_rpc", {"method": method, "kwargs": arguments})

    def empty_caches(self) -> None:
        """Empties the key-value cache and the caches of processed and of encoded images."""
        for cache in ("prefix", "mm", "encoder"):
            self.post(f"reset_{cache}_cache")


def _parse_json(text: str) -> Any:
    """Parses the JSON of an answer; {} if it is empty. Raises Failed if it is not JSON."""
    try:
        return json.loads(text) if text else {}
    except (ValueError, RecursionError):
        raise Failed(f"the answer is not JSON: {' '.join(text.split())[:100]!r}") from None


def _text(answer: requests.Response) -> str:
    """Reads the body of an answer. Raises Failed beyond MAX_ANSWER bytes."""
    content = b""
    try:
        while chunk := answer.raw.read1(2**16, decode_content=True):
            content += chunk
            if len(content) > MAX_ANSWER:
                raise Failed(f"the answer is longer than {MAX_ANSWER} bytes")
    except urllib3.exceptions.HTTPError as error:
        raise requests.ConnectionError(str(error)) from error
    return content.decode(errors="replace")

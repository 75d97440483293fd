"""One server of vLLM, talked to over HTTP: it is given weights, and answers requests."""

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

PAUSE, LONGEST_PAUSE = 0.5, 5.0  # seconds between two attempts, the first time and at most
ATTEMPTS = 3  # of a request that a running server fails to answer
LOST = requests.RequestException  # raised by a request to a server that has ended or is ending
SILENCE_S = 60  # seconds without a sign of life from a host's network, after which its connections are closed
MAX_ANSWER = 2**30  # bytes
Step = tuple[str, Callable[[], Any]]  # what a server is to do, for messages, and the call that does it


class Failed(requests.ConnectionError):
    """Raised where a server runs, and reports that it could not do what it was asked to."""


@dataclass(frozen=True)
class EngineWeights:
    """The weights that engines shall compute with: those of a folder, named `base`, and a LoRA where there is one."""

    base: str
    folder: Path
    adapter: Path | None = None

    @property
    def version(self) -> str:
        return self.base if self.adapter is None else f"{self.base}.{self.adapter.name}"


Give = Callable[["Server", EngineWeights], None]  # raises one of LOST, and UserError


class Watched(HTTPAdapter):
    """TCP connections with keepalive: they end where the other host no longer answers on the network. A host that lost
    power closes no connection, and a response may take long, so that no read timeout would tell."""

    def init_poolmanager(self, *arguments: Any, **options: Any) -> None:
        watching = [*HTTPConnection.default_socket_options, (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
        if sys.platform == "linux":  # other systems keep their own timeout
            tcp, probe = socket.IPPROTO_TCP, SILENCE_S // 4
            watching += [(tcp, socket.TCP_KEEPIDLE, probe), (tcp, socket.TCP_KEEPINTVL, probe)]
            watching += [(tcp, socket.TCP_USER_TIMEOUT, 1000 * SILENCE_S)]
        super().init_poolmanager(*arguments, socket_options=watching, **options)


@dataclass
class Bearer(requests.auth.AuthBase):
    key: str

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        request.headers["Authorization"] = f"Bearer {self.key}"
        return request


def watched() -> requests.Session:
    """Returns an HTTP session whose connections are watched by keepalive."""
    session = requests.Session()
    for scheme in ("http://", "https://"):
        session.mount(scheme, Watched(pool_maxsize=1024))  # more than are ever in flight with one engine
    return session


@dataclass
class Server:
    """One engine. where: its address, which may be another one after it was started again. suspect: it failed, and has
    to be refreshed before it is asked again. failures: since it last answered, while it ran."""

    where: Callable[[], str]
    timeout: float  # seconds
    key: str = field(default="", repr=False)
    suspect: bool = False
    failures: int = 0
    retry_at: float = 0.0  # by the monotonic clock
    lock: threading.Lock = field(default_factory=threading.Lock)
    session: requests.Session = field(default_factory=watched)

    @property
    def address(self) -> str:
        return self.where()

    def failed(self, *, runs: bool) -> None:
        """Leaves it alone for a while, longer each time. A request that fails in that while was sent before, and is not
        counted again."""
        self.suspect = True
        if not self.backs_off():
            self.failures += runs
            self.retry_at = time.monotonic() + min(PAUSE * 2 ** max(0, self.failures - 1), LONGEST_PAUSE)

    def backs_off(self) -> bool:
        return time.monotonic() < self.retry_at

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Posts a request. Raises one of LOST where there is no answer, and UserError where it is refused."""
        return self._exchange("POST", path, body)

    def version(self) -> str:
        info = self._exchange("GET", "weight_info")
        if not isinstance(info, dict) or not isinstance(info.get("weight_version"), str):
            raise Failed(f"/weight_info gives no version: {str(info)[:100]}")
        return info["weight_version"]

    def _exchange(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Sends a request. The timeout of requests bounds each wait for bytes, and `_text` their sum."""
        end, auth = time.monotonic() + self.timeout, Bearer(self.key) if self.key else None
        options: dict[str, Any] = {"timeout": self.timeout, "stream": True, "allow_redirects": False}
        with self.session.request(method, f"{self.address}/{path}", json=body, auth=auth, **options) as answer:
            text = self._read(answer.status_code, _text(answer, end), path)
            # Some paths answer in plain text
            return parsed(text) if "json" in answer.headers.get("content-type", "") else {}

    def _read(self, status: int, text: str, path: str) -> str:
        """The text of an answer that is not a refusal."""
        message = " ".join(text.split())[:300]
        if status >= 500:
            raise Failed(f"{status} {message}")
        if status == 401:
            raise UserError(
                f"the vLLM server at {self.address} asks for a key; set {KEY} to the one it was started with"
            )
        if status == 404 and "does not exist" in text:  # the LoRA: it was started again
            raise requests.ConnectionError(message)
        if status == 404 and '"error"' not in text:  # of the path
            more = ", VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora" if "lora" in path else ""
            raise UserError(
                f"the vLLM server at {self.address} has no /{path}; start it with VLLM_SERVER_DEV_MODE=1 in its "
                "environment and --enable-scale-out --logprobs-mode processed_logprobs --generation-config vllm "
                f"--worker-extension-cls mmrl.generation.weight_sync.receiver.Arrival{more}"
            )
        if status >= 300:
            raise UserError(f"the vLLM server at {self.address} refuses /{path}: {status} {message}")
        return text

    def refresh(self, weights: EngineWeights, give: Give, alive: Callable[[], bool] = lambda: True) -> None:
        """Gives it the weights unless it has them, as soon as it answers. Raises UserError if it does not within
        `timeout`, if it runs and fails at it, and when it is no longer alive."""
        self._persist(lambda: self._steps(self.version(), weights, give), alive)
        self.suspect = False

    def ask(self, method: str, alive: Callable[[], bool] = lambda: True) -> list[Any]:
        """Returns what each process of the engine returns for a method without arguments, as soon as it answers. Raises
        UserError as `refresh` does."""
        results: list[Any] = []
        self._persist(lambda: iter([("answer", lambda: results.extend(self.call(method)["results"]))]), alive)
        return results

    def _persist(self, steps: Callable[[], Iterator[Step]], alive: Callable[[], bool]) -> None:
        """Tries the steps from the beginning until all succeed. Raises UserError after `timeout` seconds or ATTEMPTS
        failures of a running server, and where it is no longer alive."""
        deadline, failures, pause = time.monotonic() + self.timeout, 0, PAUSE
        doing, last = "answer", "no answer"
        with self.lock:
            while alive() and time.monotonic() < deadline and failures < ATTEMPTS:
                try:
                    doing = "answer"
                    for step in steps():
                        doing = step[0]
                        step[1]()
                    return
                except LOST as error:
                    failures += isinstance(error, Failed)
                    last = " ".join(str(error).split())[-200:]
                    time.sleep(pause)
                    pause = min(2 * pause, LONGEST_PAUSE)
        if failures < ATTEMPTS and alive():
            raise UserError(
                f"the vLLM server at {self.address} did not {doing} within rollout.generator.timeout={self.timeout:g} "
                f"s ({last}): is it running, and the address right?"
            )
        how = f"failed {failures} times" if failures == ATTEMPTS else "ended when it was"
        raise UserError(f"the vLLM server at {self.address} {how} to {doing} ({last})")

    def _steps(self, old: str, weights: EngineWeights, give: Give) -> Iterator[Step]:
        """Yields the steps from the version `old` to the wanted one."""
        base, _, adapter = old.partition(".")
        if old == weights.version:
            return
        if base != weights.base:
            yield "take the weights", lambda: give(self, weights)
        if weights.adapter is not None:
            lora = {"lora_name": weights.version, "lora_path": str(weights.adapter), "load_inplace": True}
            yield "take the LoRA", lambda: self.post("v1/load_lora_adapter", lora)
            if adapter:
                yield "forget the last LoRA", lambda: self.post("v1/unload_lora_adapter", {"lora_name": old})
        yield "empty its caches", self.forget
        yield "name its weights", lambda: self.post("update_weight_version", {"new_version": weights.version})

    def call(self, method: str, **arguments: Any) -> Any:
        """Calls a method of `mmrl.generation.weight_sync.receiver.Arrival` in each process of the engine."""
        return self.post("collective_rpc", {"method": method, "kwargs": arguments})

    def forget(self) -> None:
        """Empties the caches of keys and values, of processed images and of encoded images."""
        for cache in ("prefix", "mm", "encoder"):
            self.post(f"reset_{cache}_cache")


def parsed(text: str) -> Any:
    try:
        return json.loads(text) if text else {}
    except (ValueError, RecursionError):
        raise Failed(f"the answer is not JSON: {' '.join(text.split())[:100]!r}") from None


def _text(answer: requests.Response, end: float) -> str:
    """Reads the body of an answer. Raises requests.Timeout after `end` (monotonic seconds), and Failed beyond
    MAX_ANSWER bytes."""
    content = b""
    try:
        while chunk := answer.raw.read1(2**16, decode_content=True):
            content += chunk
            if len(content) > MAX_ANSWER:
                raise Failed(f"the answer is longer than {MAX_ANSWER} bytes")
            if time.monotonic() > end:
                raise requests.Timeout("the answer was not complete in time")
    except urllib3.exceptions.HTTPError as error:
        raise requests.ConnectionError(str(error)) from error
    return content.decode(errors="replace")

"""vLLM's servers: engines in processes of their own, started here, placed by Ray or given by address, each a replica.

They are talked to over HTTP, tokens in and tokens out. Weights go through a folder that all of them can read.
"""

from __future__ import annotations

import base64
import io
import queue
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import requests
import torch
from requests.adapters import HTTPAdapter
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed import TCPStore
from urllib3.connection import HTTPConnection

from mmrl.errors import UserError
from mmrl.generation.processes import PlacedProcess, Process
from mmrl.generation.sampling import Sampling
from mmrl.generation.vllm import (
    GIB,
    Answer,
    EngineOptions,
    Request,
    bundled,
    check_installed,
    check_length,
    check_read,
    recorded,
    sampling_parameters,
    versions,
)
from mmrl.placement import Cluster

SHARD = 2 * GIB  # bytes of a file of weights, which are held in memory until it is written
PAUSE = 0.5  # seconds between two attempts
LOST = requests.RequestException  # what becomes of a request to a server that went away, or is going
SILENT = 60  # seconds without a sign of a host's network after which it is lost


@dataclass(frozen=True)
class Weights:
    """What engines shall compute with: those of a folder, named `base`, and a LoRA where there is one."""

    base: str
    folder: Path
    adapter: Path | None = None

    @property
    def version(self) -> str:
        return self.base if self.adapter is None else f"{self.base}.{self.adapter.name}"


class Watched(HTTPAdapter):
    """Connections that end where the other host has gone silent: one without power does not say that it is gone, and a
    response may be long in coming."""

    def init_poolmanager(self, *arguments: Any, **options: Any) -> None:
        watching = [*HTTPConnection.default_socket_options, (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
        if sys.platform == "linux":  # others wait as long as they are set to
            tcp, probe = socket.IPPROTO_TCP, SILENT // 4
            watching += [(tcp, socket.TCP_KEEPIDLE, probe), (tcp, socket.TCP_KEEPINTVL, probe)]
            watching += [(tcp, socket.TCP_USER_TIMEOUT, 1000 * SILENT)]
        super().init_poolmanager(*arguments, socket_options=watching, **options)


def watched() -> requests.Session:
    session = requests.Session()
    for scheme in ("http://", "https://"):
        session.mount(scheme, Watched(pool_maxsize=1024))  # more than are ever in flight with one engine
    return session


@dataclass
class Server:
    """One engine. where: its address, which may be another one after it was started again."""

    where: Callable[[], str]
    timeout: float  # seconds
    lock: threading.Lock = field(default_factory=threading.Lock)
    session: requests.Session = field(default_factory=watched)

    @property
    def address(self) -> str:
        return self.where()

    def post(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Raises one of LOST where it does not answer, and UserError where it refuses."""
        return self._read(self.session.post(f"{self.address}/{path}", json=body, timeout=self.timeout), path)

    def version(self) -> str:
        path = "weight_info"
        return self._read(self.session.get(f"{self.address}/{path}", timeout=self.timeout), path)["weight_version"]

    def _read(self, answer: requests.Response, path: str) -> dict[str, Any]:
        if answer.status_code >= 500:
            raise requests.ConnectionError(f"{answer.status_code} {one_line(answer)}")
        if answer.status_code == 404 and "does not exist" in answer.text:  # the LoRA: it was started again
            raise requests.ConnectionError(one_line(answer))
        if answer.status_code == 404 and '"error"' not in answer.text:  # of the path
            more = ", VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora" if "lora" in path else ""
            raise UserError(
                f"the vLLM server at {self.address} has no /{path}; start it with VLLM_SERVER_DEV_MODE=1 in its "
                f"environment and --enable-scale-out --logprobs-mode processed_logprobs --generation-config vllm{more}"
            )
        if answer.status_code >= 400:
            raise UserError(f"the vLLM server at {self.address} refuses /{path}: {one_line(answer)}")
        return answer.json() if answer.content and "json" in answer.headers.get("content-type", "") else {}

    def refresh(self, weights: Weights, alive: Callable[[], bool] = lambda: True) -> None:
        """Gives it the weights unless it has them, as soon as it answers. Raises UserError in the end."""
        deadline, last = time.monotonic() + self.timeout, "no answer"
        with self.lock:
            while alive() and time.monotonic() < deadline:
                try:
                    if (old := self.version()) == weights.version:
                        return
                    base, _, adapter = old.partition(".")
                    if base != weights.base:
                        folder = {"weights_path": str(weights.folder)}
                        self.post("collective_rpc", {"method": "reload_weights", "kwargs": folder})
                    if weights.adapter is not None:
                        given = {"lora_name": weights.version, "lora_path": str(weights.adapter), "load_inplace": True}
                        self.post("v1/load_lora_adapter", given)
                        if adapter:
                            self.post("v1/unload_lora_adapter", {"lora_name": old})
                    self.forget()
                    self.post("update_weight_version", {"new_version": weights.version})
                except LOST as error:
                    last = " ".join(str(error).split())[-200:]
                    time.sleep(PAUSE)
        raise UserError(
            f"the vLLM server at {self.address} did not answer within rollout.vllm.timeout={self.timeout:g} s "
            f"({last}): is it running, and the address right?"
        )

    def forget(self) -> None:
        """Empty the caches of keys and values, of processed pictures and of encoded pictures."""
        for cache in ("prefix", "mm", "encoder"):
            self.post(f"reset_{cache}_cache")


class Servers:
    """Engines that share the requests of a batch: each takes the next one when it has room, so a slow one holds nobody
    up. What an engine had when it died is asked again elsewhere. Engines that were started here are started again.

    Methods marked collective are called by all ranks. Rank 0 starts engines, writes weights and looks after both.
    """

    def __init__(
        self,
        folder: Path,
        options: EngineOptions,
        *,
        describe: Callable[[Path], None],
        gather: Callable[[Any], list[Any]],
        rank: int = 0,
        count: int = 1,
        addresses: Sequence[str] = (),
        host: str = "127.0.0.1",
        first_device: int = 0,
        in_flight: int = 32,
        timeout: float = 600.0,
        ray: str | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        """Collective. folder: for weights, readable by all servers. describe: writes the configuration and the
        processor of the model into a folder. gather: a value of each rank. count: engines to start, where no
        `addresses` are given; each gets options.tensor_parallel GPUs from first_device on. in_flight: prompts that a
        rank leaves with one engine at a time, with all responses to each. timeout: seconds that starting, loading and a
        request may take. ray: address of a Ray cluster, or "auto", that finds hosts and GPUs for the engines, instead
        of host and first_device.

        Raises UserError where vLLM has to be started and is not installed, and where there is no such cluster.
        """
        self.folder, self.options, self.describe, self.gather, self.rank = folder, options, describe, gather, rank
        self.in_flight, self.say = in_flight, say
        self.processes: list[Process] = []
        self.known: TCPStore | None = None  # where Ray has them, for all ranks
        if not addresses:
            check_installed()
            logs = [folder / f"server-{i}.log" for i in range(count)]
            if ray is not None:
                self._prepare(ray, logs, timeout)
            else:
                ports = gather([free_port(host) for _ in range(count)])[0]
                addresses = [f"http://{host}:{port}" for port in ports]
                if rank == 0:
                    places = [first_device + i * options.tensor_parallel for i in range(count)]
                    self.processes = [Process(options, *own) for own in zip(logs, addresses, places, strict=True)]
        if self.known is None:
            self.servers = [Server(partial(str, address.rstrip("/")), timeout) for address in addresses]
        else:
            self.servers = [Server(partial(read, self.known, i), timeout) for i in range(count)]
        self.run = gather(uuid4().hex[:8])[0]  # engines by address may have served another one
        self.number = self.adapters = 0  # of the weights, and of LoRAs on them
        self.restarts = self.asked_again = 0
        self.answered = [0] * len(self.servers)
        self._closed = threading.Event()
        self._keeper = threading.Thread(target=self._keep_alive, daemon=True)

    def _prepare(self, ray: str, logs: Sequence[Path], timeout: float) -> None:
        """Collective. Engines that Ray will place, and the store in which rank 0 tells the others where."""
        problem = host = port = None
        if self.rank == 0:
            try:
                cluster = Cluster(ray, "rollout.vllm.ray")
                host, self.known = cluster.host, TCPStore(cluster.host, 0, is_master=True, wait_for_workers=False)
                tell = [partial(self.known.set, str(i)) for i in range(len(logs))]
                self.processes = [
                    PlacedProcess(self.options, log, cluster=cluster, tell=told, patience=timeout)
                    for log, told in zip(logs, tell, strict=True)
                ]
                port = self.known.port
            except UserError as error:
                problem = str(error)
        problem, host, port = self.gather((problem, host, port))[0]
        if problem:
            raise UserError(problem)
        if self.known is None:
            self.known = TCPStore(host, port, wait_for_workers=False)

    @property
    def current(self) -> Weights:
        """What engines have or are about to get."""
        adapter = self.folder / f"adapter-{self.adapters}" if self.adapters else None
        return Weights(f"{self.run}-{self.number}", self.folder / f"weights-{self.number}", adapter)

    @property
    def replicas(self) -> Sequence[Replica]:
        return [Replica(self, i) for i in range(len(self.servers))]

    # --- weights ---

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Collective. Replace the weights of all engines; see `VLLM.load`. Raises UserError on every rank."""
        weights, problem = iter(weights), None
        if self.rank == 0:
            coming = self.folder / f"weights-{self.number + 1}"
            try:
                write_weights(coming, weights)
                self.describe(coming)
            except (OSError, SafetensorError) as error:
                problem = unwritten(coming, error)
        for _ in weights:  # parts may have to be gathered from all ranks
            pass
        self.number += 1
        self._share(problem, self.folder / f"weights-{self.number - 1}")

    def adapt(self, write: Callable[[Path | None], None]) -> None:
        """Collective. Replace the LoRA of all engines; see `VLLM.adapt`. `write` is a collective too, and writes where
        it gets a folder. Raises UserError on every rank."""
        coming, problem = self.folder / f"adapter-{self.adapters + 1}", None
        try:
            write(coming if self.rank == 0 else None)
        except (OSError, SafetensorError) as error:
            problem = unwritten(coming, error)
        self.adapters += 1
        self._share(problem, self.folder / f"adapter-{self.adapters - 1}")

    def _share(self, problem: str | None, before: Path) -> None:
        """Gives engines what was written, unless there was a problem. before: what is not needed after that."""
        if self.rank == 0 and problem is None:
            problem = self._give()
        problem = next((found for found in self.gather(problem) if found), None)
        if problem:
            raise UserError(problem)
        if self.rank == 0:
            shutil.rmtree(before, ignore_errors=True)

    def _give(self) -> str | None:
        """What went wrong."""
        new = [process for process in self.processes if process.running is None]
        try:
            with ThreadPoolExecutor(max(1, len(new))) as pool:
                list(pool.map(lambda process: process.start(self.current.folder), new))
        except (UserError, ConnectionError) as error:
            return str(error)
        if self.processes and not self._keeper.is_alive():
            self._keeper.start()
        try:
            for server in self.servers:
                server.refresh(self.current, self._bearable)
        except UserError as error:
            return f"{error}{self._last_words()}"
        for process in self.processes:
            process.failures = 0
        return None

    def _bearable(self) -> bool:
        """Whether an engine still may come up: one that ends each time it is started does not."""
        return all(process.failures < 3 for process in self.processes)

    def _last_words(self) -> str:
        failing = [process for process in self.processes if process.failures]
        return "".join(f"; {process.log} says: {process.last_words()}; {versions()}" for process in failing[:1])

    def _keep_alive(self) -> None:
        """Starts engines again that have ended, with the weights of now."""
        while not self._closed.wait(PAUSE):
            for process in self.processes:
                if process.ended() and self._bearable() and not self._closed.is_set():
                    self.restarts += 1
                    self.say(f"the vLLM server at {process.address} ended; starting it again ({process.log})")
                    try:
                        process.start(self.current.folder)
                    except (UserError, ConnectionError) as error:  # no host has room
                        with process.log.open("a") as file:
                            file.write(f"Error: {error}\n")

    # --- generation ---

    def generate(self, requests: Sequence[Request], *, sampling: Sampling, eos: tuple[int, ...]) -> list[Answer]:
        """`VLLM.generate`, each response exactly once. Raises UserError as that does, and if no engine is left."""
        return self.ask(range(len(self.servers)), requests, sampling, eos)

    def ask(
        self, servers: Sequence[int], requests: Sequence[Request], sampling: Sampling, eos: tuple[int, ...]
    ) -> list[Answer]:
        """`generate` by these of the servers."""
        for request in requests:
            check_length(request, self.options.context)
        share = -(-len(requests) // len(servers))  # so that there is something for each of them
        requests = bundled(requests, min(share, self.options.max_sequences))
        batch = Batch(self._bodies(requests, sampling, eos))
        room = min(self.in_flight, len(requests))
        with ThreadPoolExecutor(room * len(servers)) as pool:
            work = [pool.submit(self._work, i, batch) for i in servers for _ in range(room)]
            try:
                for done in as_completed(work):
                    done.result()
            finally:
                batch.over = True
        if batch.left:
            raise next(iter(batch.lost.values()))
        for request, found in zip(requests, batch.found, strict=True):
            check_read(request, found["prompt_token_ids"])
        return [_answer(choice) for found in batch.found for choice in found["choices"]]

    def _bodies(self, requests: Sequence[Request], sampling: Sampling, eos: tuple[int, ...]) -> list[dict[str, Any]]:
        """As /inference/v1/generate takes them."""
        model = {} if self.current.adapter is None else {"model": self.current.version}
        pictures = {id(r.images): [data_url(image) for image in r.images] for r in requests}
        return [
            {**content(r, pictures[id(r.images)]), **model, "sampling_params": sampling_parameters(r, sampling, eos)}
            for r in requests
        ]

    def _work(self, number: int, batch: Batch) -> None:
        """Takes requests to one server until all of the batch are answered, or the server is lost. Raises UserError for
        a request that it refuses."""

        def hopeful() -> bool:
            return batch.unfinished() and number not in batch.lost and not self._closed.is_set()

        server = self.servers[number]
        while (place := batch.take()) is not None:
            try:
                found = server.post("inference/v1/generate", batch.bodies[place])
                parts = [part for choice in found["choices"] for part in choice["weight_versions"]]
                if {part["version"] for part in parts} != {self.current.version}:
                    raise LOST("it was started again and has other weights")
            except LOST:
                batch.give_back(place)
                self.asked_again += 1
                try:
                    server.refresh(self.current, hopeful)
                except UserError as error:
                    batch.lost[number] = error
                    return
            else:
                batch.put(place, found)
                self.answered[number] += len(found["choices"])

    # --- life ---

    def measures(self) -> dict[str, float]:
        """Counts since the last call."""
        counts = {"generation/restarts": float(self.restarts), "generation/asked_again": float(self.asked_again)}
        self.restarts = self.asked_again = 0
        return counts

    def wake(self) -> None:
        """They never sleep."""

    def sleep(self) -> None:
        """They never sleep."""

    def close(self) -> None:
        """Ends the engines that were started here."""
        self._closed.set()
        for process in self.processes:
            process.stop()
        if self.rank == 0:
            for written in (self.current.folder, self.current.adapter):
                shutil.rmtree(written or "", ignore_errors=True)


@dataclass
class Replica:
    """One engine of several, to be asked by itself; weights come to all at once."""

    all: Servers
    number: int

    def generate(self, requests: Sequence[Request], *, sampling: Sampling, eos: tuple[int, ...]) -> list[Answer]:
        return self.all.ask([self.number], requests, sampling, eos)


class Batch:
    """Requests on their way: each is with one server at a time and gets one answer."""

    def __init__(self, bodies: list[dict[str, Any]]) -> None:
        self.bodies = bodies
        self.found: list[Any] = [None] * len(bodies)
        self.lost: dict[int, UserError] = {}  # servers that did not come back
        self.over = False  # answered or not
        self._waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
        for place in range(len(bodies)):
            self._waiting.put(place)
        self.left = len(bodies)
        self._lock = threading.Lock()

    def take(self) -> int | None:
        """The next place; None when there is nothing left to answer, also not what another server has."""
        while self.unfinished():
            try:
                return self._waiting.get(timeout=PAUSE / 10)
            except queue.Empty:
                continue
        return None

    def give_back(self, place: int) -> None:
        self._waiting.put(place)

    def put(self, place: int, found: dict[str, Any]) -> None:
        with self._lock:
            self.found[place] = found
            self.left -= 1

    def unfinished(self) -> bool:
        return self.left > 0 and not self.over


def read(store: TCPStore, number: int) -> str:
    """The address of an engine, as rank 0 told it."""
    return store.get(str(number)).decode()


def write_weights(folder: Path, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Files in safetensors' format; at most SHARD bytes and one tensor more are in memory at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    shard: dict[str, Tensor] = {}
    size = files = 0
    for name, value in weights:
        shard[name] = value.detach().cpu().contiguous()
        size += shard[name].nbytes
        if size >= SHARD:
            save_file(shard, folder / f"model-{files:05d}.safetensors", metadata={"format": "pt"})
            shard, size, files = {}, 0, files + 1
    if shard:
        save_file(shard, folder / f"model-{files:05d}.safetensors", metadata={"format": "pt"})


def content(request: Request, pictures: Sequence[str]) -> dict[str, Any]:
    """Prompt and pictures as /inference/v1/generate takes them."""
    parts = [{"type": "image_url", "url": picture} for picture in pictures]
    return {"token_ids": request.marked, "return_token_ids": True, **({"content_parts": parts} if parts else {})}


def data_url(image: Any) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def one_line(answer: requests.Response) -> str:
    return " ".join(answer.text.split())[:300]


def unwritten(path: Path, error: Exception) -> str:
    return f"{path} can not be written ({error}); rollout.vllm.exchange names another folder"


def free_port(host: str) -> int:
    with closing(socket.socket()) as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def _answer(choice: dict[str, Any]) -> Answer:
    logp = [token["logprob"] for token in choice["logprobs"]["content"]]
    experts = choice.get("routed_experts")  # a file of numpy's
    array = None if experts is None else np.load(io.BytesIO(base64.b64decode(experts)))
    return Answer(torch.tensor(choice["token_ids"]), torch.tensor(logp), recorded(array))

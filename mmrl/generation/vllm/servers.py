"""Generation by vLLM servers: engines in processes of their own, started here, placed by Ray or given by address.

Each is a replica of the model. Requests and responses are tokens, sent over HTTP.
`mmrl.generation.weight_sync.transfer` sends the weights.
"""

from __future__ import annotations

import base64
import io
import os
import queue
import secrets
import shutil
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from PIL import Image
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed import TCPStore

from mmrl.children.processes import free_port
from mmrl.children.ray import Cluster
from mmrl.engine.launcher import store_at
from mmrl.errors import UserError
from mmrl.generation.sampling import Sampling
from mmrl.generation.settings import VLLMServer
from mmrl.generation.vllm import responses
from mmrl.generation.vllm.api_key import KEY
from mmrl.generation.vllm.client import ATTEMPTS, LOST, PAUSE, EngineWeights, Failed, Server
from mmrl.generation.vllm.engine import (
    EngineOptions,
    Request,
    bundled,
    check_installed,
    check_length,
    check_tokens,
    sampling_parameters,
)
from mmrl.generation.vllm.processes import PlacedProcess, Process, devices_of
from mmrl.generation.vllm.responses import Answer, BadAnswer
from mmrl.generation.weight_sync.checksums import Report, report
from mmrl.generation.weight_sync.folders import Exchange, remove_abandoned
from mmrl.generation.weight_sync.transfer import Broadcast, Folder, Transfer, unwritten

T = TypeVar("T")
MAX_FAILURES = 3  # ends of a server between two transfers of weights, after which the run stops


class Servers:
    """Several engines that share the requests of a batch. Each takes the next request when it has capacity.

    Requests of an engine that ended are sent to another one. Engines that rank 0 started are restarted. Methods marked
    "Collective" must be called by all ranks; rank 0 starts engines and sends weights.
    """

    def __init__(
        self,
        folder: Path,
        options: EngineOptions,
        *,
        describe: Callable[[Path], None],
        gather: Callable[[Any], list[Any]],
        rank: int = 0,
        say: Callable[[str], None] = print,
    ) -> None:
        """Prepares the engines; the first `load` starts them. A collective.

        folder: a folder that all servers can read, for the files that engines start from and for weights. options:
        how each engine runs, with `VLLMServer` as settings. describe: writes the configuration and the processor of
        the model into a folder. gather: returns the list of all ranks' values. say: shows a message to the user.

        Raises UserError if vLLM has to be started and is not installed, and if there is no such Ray cluster.
        """
        settings = options.settings
        assert isinstance(settings, VLLMServer)
        self.options, self.describe, self.gather, self.rank = options, describe, gather, rank
        self.in_flight, self.say = settings.in_flight, say
        count, addresses, host, timeout = settings.servers, settings.addresses, settings.host, settings.timeout
        # Engines that are started here get a random key; the user chose the key of engines by address
        key = os.environ.get(KEY, "") if addresses else gather(secrets.token_urlsafe(32))[0]
        self.processes: list[Process] = []
        self.store: TCPStore | None = None  # if Ray places the engines: their addresses, for all ranks
        if not addresses:
            check_installed()
            logs = [folder / f"server-{i}.log" for i in range(count)]
            if settings.ray is not None:
                self._prepare(settings.ray, logs, timeout, key)
            else:
                first_devices = devices_of(settings, gather)
                ports = gather([free_port(host) for _ in range(count)])[0]
                addresses = [f"http://{host}:{port}" for port in ports]
                if rank == 0:
                    self.processes = [
                        Process(options, key, log, address, device)
                        for log, address, device in zip(logs, addresses, first_devices, strict=True)
                    ]
        if self.store is None:
            self.servers = [Server(partial(str, address.rstrip("/")), timeout, key) for address in addresses]
        else:
            self.servers = [Server(partial(published_address, self.store, i), timeout, key) for i in range(count)]
        self.run = gather(uuid4().hex[:8])[0]  # a name, since engines by address may have served another run
        self.exchange = Exchange(folder, self.run)
        if rank == 0:
            for abandoned in remove_abandoned(folder):
                say(f"removed {abandoned}: weights of a run that has ended")
        self.number = self.adapters = 0  # versions of the weights, and of the LoRA on them
        self.restarts = self.retries = 0
        self.answered = [0] * len(self.servers)
        self.transfer: Transfer = Folder(self.exchange, describe)
        if settings.transfer == "broadcast":
            self.transfer = Broadcast(self.exchange, describe, self.servers, timeout=timeout, rank=rank, say=say)
        for process in self.processes:
            process.loading = self.transfer.arguments()
        self._weights_lock = threading.Lock()  # held while weights are sent, to all engines or to a restarted one
        self._closed = threading.Event()
        self._keeper = threading.Thread(target=self._keep_alive, daemon=True)

    def _prepare(self, ray: str, logs: Sequence[Path], timeout: float, key: str) -> None:
        """Collective. Prepares the engines that Ray places, and the store of rank 0 in which their addresses are
        published."""
        problem = host = port = None
        if self.rank == 0:
            try:
                cluster = Cluster(ray, "rollout.generator.ray")
                host, self.store = cluster.host, store_at(cluster.host)
                publishers = [partial(self.store.set, str(i)) for i in range(len(logs))]
                self.processes = [
                    PlacedProcess(self.options, key, log, cluster=cluster, publish=publish, patience=timeout)
                    for log, publish in zip(logs, publishers, strict=True)
                ]
                port = self.store.port
            except UserError as error:
                problem = str(error)
        problem, host, port = self.gather((problem, host, port))[0]
        if problem:
            raise UserError(problem)
        if self.store is None:
            self.store = TCPStore(host, port, wait_for_workers=False)

    @property
    def current(self) -> EngineWeights:
        """The weights that engines have, or are about to get."""
        return self._weights(self.number)

    def _weights(self, number: int) -> EngineWeights:
        """Returns the names and folders of version `number` of the weights, with the present LoRA."""
        folder = self.exchange.path
        adapter = folder / f"adapter-{self.adapters}" if self.adapters else None
        return EngineWeights(f"{self.run}-{number}", folder / f"weights-{number}", adapter)

    @property
    def replicas(self) -> Sequence[Replica]:
        """The single engines."""
        return [Replica(self, i) for i in range(len(self.servers))]

    # --- weights ---

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Collective. Replaces the weights of all engines; see `VLLM.load`. Raises UserError on every rank."""
        weights, problem, before = iter(weights), None, self.current.folder
        with self._weights_lock:
            if self.rank == 0:
                problem = self._error_of(partial(self.transfer.prepare, weights, self._weights(self.number + 1)))
            self.number += 1
            if self.rank == 0 and problem is None:
                problem = self._error_of(self._start) or self._error_of(
                    partial(self.transfer.send, weights, self.current, self._may_recover)
                )
            for _ in weights:  # parts may have to be gathered from all ranks
                pass
            self._share(problem, before)

    def _error_of(self, step: Callable[[], None]) -> str | None:
        """Runs `step`. Returns the message of its error, with the reason if a server ended; None if it succeeds."""
        try:
            step()
        except (UserError, ConnectionError) as error:
            return f"{error}{first_failure(self.processes)}"
        return None

    def adapt(self, write: Callable[[Path | None], None]) -> None:
        """Collective. Replaces the LoRA of all engines; see `VLLM.adapt`. write: collective, too; it gets None on ranks
        that do not write. Raises UserError on every rank."""
        next_folder, problem = self.exchange.path / f"adapter-{self.adapters + 1}", None
        try:
            write(next_folder if self.rank == 0 else None)
        except (OSError, SafetensorError) as error:
            problem = unwritten(next_folder, error)
        with self._weights_lock:
            self.adapters += 1
            self._share(problem, self.exchange.path / f"adapter-{self.adapters - 1}")

    def _share(self, problem: str | None, before: Path) -> None:
        """Sends the present weights to all engines, unless there was a problem. before: the previous folder, which is
        then removed. Raises UserError on every rank."""
        if self.rank == 0 and problem is None:
            problem = self._give()
        problem = next((message for message in self.gather(problem) if message), None)
        if self.rank == 0:
            shutil.rmtree(before, ignore_errors=True)
        if problem:
            self.close()
            raise UserError(problem)

    def arrived(self) -> list[Report]:
        """Returns the reports of all engines on rank 0; none on the other ranks. Raises UserError like `_arrived`."""
        return [self._arrived(server) for server in self.servers] if self.rank == 0 else []

    def _arrived(self, server: Server) -> Report:
        """Returns an engine's report on the weights that it has; an engine that was restarted gets them again first.
        Raises UserError after ATTEMPTS failures."""
        adapter, last = self.current.adapter, ""
        for _ in range(ATTEMPTS):
            try:
                return report(server.call("arrived", adapter=adapter and str(adapter))["results"])
            except LOST as error:  # it may have been restarted
                last = " ".join(str(error).split())[:300]
                self._refresh(server, self._may_recover)
            except (LookupError, TypeError, ValueError) as error:
                last = repr(error)
        raise UserError(
            f"the vLLM server at {server.address} does not report which weights it has ({last}); see "
            "mmrl/generation/README.md for how to start it"
        )

    def _start(self) -> None:
        """Starts the engines that do not run yet. Raises UserError and ConnectionError like `PlacedProcess.start`."""
        new = [process for process in self.processes if process.running is None]
        in_parallel(lambda process: process.start(self.transfer.model(self.current)), new)
        if self.processes and not self._keeper.is_alive():
            self._keeper.start()

    def _refresh(self, server: Server, alive: Callable[[], bool]) -> None:
        """Sends the present weights to a server that does not have them; see `Server.refresh`."""
        server.refresh(self.current, self.transfer.give, alive)

    def _give(self) -> str | None:
        """Sends the present weights to all engines in parallel. Returns an error message, or None."""
        if problem := self._error_of(
            lambda: in_parallel(lambda server: self._refresh(server, self._may_recover), self.servers)
        ):
            return problem
        for process in self.processes:
            process.failures = 0
        return None

    def _may_recover(self) -> bool:
        """Returns False once a server has ended MAX_FAILURES times since all engines last got new weights."""
        return all(process.failures < MAX_FAILURES for process in self.processes)

    def _keep_alive(self) -> None:
        """Restarts engines that have ended, and sends them the present weights. It runs in a thread, since other ranks
        may wait for the engine."""
        while not self._closed.wait(PAUSE):
            for process, server in zip(self.processes, self.servers, strict=True):
                if process.ended() and self._may_recover() and not self._closed.is_set():
                    self.restarts += 1
                    self.say(f"the vLLM server at {process.address} ended; starting it again ({process.log})")
                    try:
                        process.start(self.transfer.model(self.current))
                    except (UserError, ConnectionError) as error:  # no host has free GPUs
                        with process.log.open("a") as file:
                            file.write(f"Error: {error}\n")
                    else:
                        threading.Thread(target=self._bring_up_to_date, args=(server,), daemon=True).start()

    def _bring_up_to_date(self, server: Server) -> None:
        """Sends the present weights to a restarted engine. Errors are ignored: the engine's next request raises
        them."""
        with self._weights_lock, suppress(UserError):
            self._refresh(server, lambda: self._may_recover() and not self._closed.is_set())

    # --- generation ---

    def generate(self, requests: Sequence[Request], *, sampling: Sampling, eos: tuple[int, ...]) -> list[Answer]:
        """Samples the requested responses by all engines; see `VLLM.generate`. Raises UserError, too, if no engine is
        left."""
        return self.ask(range(len(self.servers)), requests, sampling, eos)

    def ask(
        self, servers: Sequence[int], requests: Sequence[Request], sampling: Sampling, eos: tuple[int, ...]
    ) -> list[Answer]:
        """Samples the requested responses by the engines with the indices `servers`. Raises UserError if a
        request does not fit or is refused, or if none of these engines is left."""
        for request in requests:
            check_length(request, self.options.context)
        share = -(-len(requests) // len(servers))  # rounded up; so that each server gets requests
        requests = bundled(requests, min(share, self.options.settings.max_sequences))
        model = None if self.current.adapter is None else self.current.version
        batch = RequestBatch(requests, bodies(requests, model, sampling, eos))
        num_threads = min(self.in_flight, len(requests))
        with ThreadPoolExecutor(num_threads * len(servers)) as pool:
            work = [
                pool.submit(self._serve_batch, i, batch, sampling, eos) for i in servers for _ in range(num_threads)
            ]
            try:
                for done in as_completed(work):
                    done.result()
            finally:
                batch.over.set()
        if batch.left:  # all servers are lost
            raise next(iter(batch.lost.values()))
        return [answer for group in batch.answers for answer in group]

    def _serve_batch(self, number: int, batch: RequestBatch, sampling: Sampling, eos: tuple[int, ...]) -> None:
        """Sends requests of the batch to server `number`, one after another, until all are answered or the server is
        lost. Raises UserError for a request that the server refuses, and for one without a valid answer after ATTEMPTS
        attempts."""

        def still_needed() -> bool:
            """Returns whether it makes sense to wait for the server."""
            return batch.unfinished() and number not in batch.lost and not self._closed.is_set()

        server = self.servers[number]
        while number not in batch.lost and (index := batch.take(server)) is not None:
            try:
                if server.suspect:
                    self._refresh(server, still_needed)
            except UserError as error:
                batch.give_back(index)
                batch.lost[number] = error
                return
            try:
                checked = request_answers(server, batch, index, lambda: self.current.version, sampling, eos)
            except (LOST, BadAnswer) as error:
                self.retries += 1
                batch.failed(index, number, server, error)
            else:
                batch.put(index, number, checked)
                server.failures = 0
                self.answered[number] += len(checked)

    # --- sleep and end ---

    def measures(self) -> dict[str, float]:
        """Returns metrics by name: the restarts of servers and the repeated requests since the last call."""
        counts = {"generation/restarts": float(self.restarts), "generation/asked_again": float(self.retries)}
        self.restarts = self.retries = 0
        return counts

    def wake(self) -> None:
        """Does nothing: servers never sleep."""

    def serve(self) -> None:
        """Does nothing: servers never sleep."""

    def sleep(self) -> None:
        """Does nothing: servers never sleep."""

    def close(self) -> None:
        """Ends the engines that were started here."""
        self._closed.set()
        for process in self.processes:
            process.stop()
        self.transfer.close()
        if self.rank == 0:
            self.exchange.clear()


@dataclass
class Replica:
    """Engine `number` of `servers`, for requests to it alone."""

    servers: Servers
    number: int

    def generate(self, requests: Sequence[Request], *, sampling: Sampling, eos: tuple[int, ...]) -> list[Answer]:
        return self.servers.ask([self.number], requests, sampling, eos)


class RequestBatch:
    """The requests of a batch and their answers. Several threads take requests; each request is with one server at a
    time."""

    def __init__(self, requests: Sequence[Request], bodies: Sequence[dict[str, Any]]) -> None:
        """bodies: the JSON of each request, in the same order."""
        self.requests, self.bodies = requests, bodies
        self.answers: list[list[Answer]] = [[] for _ in bodies]
        self.attempts = [0] * len(bodies)
        self.lost: dict[int, UserError] = {}  # by server: why it gets no more requests
        self.able: set[int] = set()  # servers that have answered a request
        self.over = threading.Event()  # set at the end, also after an error
        self._waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
        for index in range(len(bodies)):
            self._waiting.put(index)
        self.left = len(bodies)
        self._lock = threading.Lock()

    def take(self, server: Server | None = None) -> int | None:
        """Waits for the next request, and for the end of the server's pause after a failure, and returns the request's
        index. Returns None when all requests are answered."""
        while self.unfinished():
            if server is not None and server.is_paused():
                self.over.wait(PAUSE / 10)
                continue
            try:
                return self._waiting.get(timeout=PAUSE / 10)
            except queue.Empty:
                continue
        return None

    def give_back(self, index: int) -> None:
        """Lets another thread take a request that was not answered."""
        self._waiting.put(index)

    def failed(self, index: int, number: int, server: Server, error: Exception) -> None:
        """Records that a server failed to answer a request, and gives the request back.

        number: the index of the server, which gets no more requests after ATTEMPTS failures while others answer. Raises
        UserError if the request has been tried ATTEMPTS times.
        """
        self.attempts[index] += 1
        reason = f"the vLLM server at {server.address}: {' '.join(str(error).split())[:300]}"
        if self.attempts[index] == ATTEMPTS:
            raise UserError(
                f"prompt {self.requests[index].name} was sent {ATTEMPTS} times and got no valid answer; "
                f"the last error: {reason}; see the server's log"
            )
        server.failed(runs=isinstance(error, (Failed, BadAnswer)))
        if server.failures >= ATTEMPTS and self.able - {number}:
            self.lost[number] = UserError(f"{ATTEMPTS} answers were not valid; the last error: {reason}; see its log")
        self.give_back(index)

    def put(self, index: int, number: int, answers: list[Answer]) -> None:
        """Stores the answers of server `number` to a request."""
        with self._lock:
            self.answers[index] = answers
            self.able.add(number)
            self.left -= 1

    def unfinished(self) -> bool:
        """Returns whether requests are unanswered and no error has ended the batch."""
        return self.left > 0 and not self.over.is_set()


def published_address(store: TCPStore, number: int) -> str:
    """Returns the address of engine `number`, which rank 0 has published in the store."""
    return store.get(str(number)).decode()


def in_parallel(step: Callable[[T], object], items: Sequence[T]) -> None:
    """Runs `step` for each item in a thread of its own."""
    with ThreadPoolExecutor(max(1, len(items))) as pool:
        list(pool.map(step, items))


def first_failure(processes: Sequence[Process]) -> str:
    """Returns why the first failed process ended, for the end of a message; "" if none has failed."""
    failing = [process for process in processes if process.failures]
    return "".join(f"; {process.state()}" for process in failing[:1])


def request_answers(
    server: Server,
    batch: RequestBatch,
    index: int,
    version: Callable[[], str],
    sampling: Sampling,
    eos: tuple[int, ...],
) -> list[Answer]:
    """Sends request `index` of the batch to a server and returns its answers. version: returns the version of the
    present weights. Raises BadAnswer if the answers were sampled with other weights, or are invalid."""
    request = batch.requests[index]
    payload = server.post("inference/v1/generate", batch.bodies[index])
    if others := responses.versions(payload) - {expected := version()}:
        raise BadAnswer(f"it was sampled with the weights {min(map(str, others))}, not {expected}")
    checked = responses.read(payload, request.count, request.limit, sampling, eos)
    check_tokens(request, responses.prompt_ids(payload))
    return checked


def bodies(
    requests: Sequence[Request], model: str | None, sampling: Sampling, eos: tuple[int, ...]
) -> list[dict[str, Any]]:
    """Returns the JSON bodies of requests to /inference/v1/generate. model: the name of the LoRA to use; None: no
    LoRA."""
    model_key = {} if model is None else {"model": model}
    # by identity, so that images that several requests share are encoded once
    images = {id(r.images): [data_url(image) for image in r.images] for r in requests}
    return [
        {**content(r, images[id(r.images)]), **model_key, "sampling_params": sampling_parameters(r, sampling, eos)}
        for r in requests
    ]


def content(request: Request, images: Sequence[str]) -> dict[str, Any]:
    """Returns the prompt and its images as JSON for /inference/v1/generate. Raises UserError for a prompt with videos,
    since the server does not accept frames."""
    if request.videos:
        raise UserError(
            f"prompt {request.name} has videos, which servers do not take; set rollout.generator.type=vllm_colocated"
        )
    parts = [{"type": "image_url", "url": image} for image in images]
    return {"token_ids": request.marked, "return_token_ids": True, **({"content_parts": parts} if parts else {})}


def data_url(image: Image.Image) -> str:
    """Returns an image as a data: URL with a PNG."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()

"""A pool of rollout workers, which sample with copies of the trained weights that are verified by checksums."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from mmrl.children.child import Launch, Lost, OnCluster, OnThisHost
from mmrl.children.frames import encode
from mmrl.children.ray import Cluster
from mmrl.config import Config
from mmrl.engine import Ranks, gathered_parameters
from mmrl.errors import UserError, printable
from mmrl.generation.settings import RolloutWorkers
from mmrl.generation.weight_sync.checksums import Checksum, SentWeights, absent, checksum, differing
from mmrl.generation.weight_sync.folders import Exchange, remove_abandoned, write_weights
from mmrl.protocols.parts import Policy
from mmrl.rollouts import Prompt, Rollouts, Sample
from mmrl.runtime import devices
from mmrl.schedules.schedule import Schedules
from mmrl.settings import plain
from mmrl.workers.handles import Handle
from mmrl.workers.local import without_workers
from mmrl.workers.worker import shared_objects

ATTEMPTS = 3  # starts of a worker for one request


@dataclass(frozen=True)
class WorkerWeights:
    """Weights that workers have or are about to load. number: their version, from 1. checksums: of the tensors in
    `folder`, by name. controls: the states of schedules, see `Schedules.state`."""

    number: int
    folder: Path
    checksums: dict[str, Checksum]
    controls: dict[str, dict[str, float]]


class WorkerPool:
    """The workers of a rank, with the policy's interface for rollouts. Rollouts depend only on prompts, seeds and
    weights. With one worker they are bitwise equal to those of the policy in the training process; with several they
    differ by rounding, since each worker's batch is its share of the prompts.

    A worker that ends is started again and gets its request again. Methods are called by one thread at a
    time; `sync_weights` is a collective.
    """

    def __init__(self, config: Config, settings: RolloutWorkers, policy: Policy, ranks: Ranks, *, builder: str) -> None:
        """Prepares the workers, whose processes start with their first request. builder: "package.module:function" that
        builds configuration and policy from the plain configuration, in a worker. Raises UserError if there are too few
        GPUs, or if the Ray cluster of the settings cannot be reached."""
        self.config, self.settings, self.policy, self.ranks = config, settings, policy, ranks
        self.folder = Path(settings.exchange or Path(config.run_dir) / "workers").absolute()
        logs = Path(config.run_dir) / "workers"
        first = ranks.rank * settings.count
        files = [logs / f"worker-{first + i}.log" for i in range(settings.count)]
        self.handles = [Handle(i, *pair) for i, pair in enumerate(zip(files, launched(settings, files), strict=True))]
        self.exchange = Exchange(self.folder, ranks.gather(uuid4().hex[:8])[0])
        self.current: WorkerWeights | None = None
        self.frozen: dict[str, Checksum] = {}
        self.restarts = self.asked_again = 0
        self._controls = Schedules(config)
        self._setup = encode({"config": plain(without_workers(config)), "folder": str(Path.cwd()), "builder": builder})
        self._counted: dict[str, float] = {}
        self._lock = threading.Lock()  # guards the counters

    # --- weights ---

    @contextmanager
    def generation(self) -> Iterator[dict[str, float]]:
        """Synchronises the weights of the workers; yields metrics."""
        yield self.sync_weights()

    def sync_weights(self) -> dict[str, float]:
        """Sends the present trained weights to all workers, and returns metrics. Collective. Raises UserError, on all
        ranks, if a checksum in a worker differs afterwards."""
        started, before = time.perf_counter(), self.current
        self._agree(self._write())
        problem = None
        try:
            with ThreadPoolExecutor(len(self.handles)) as threads:
                list(threads.map(lambda handle: self._ask(handle, None), self.handles))
        except UserError as error:  # raised below, on all ranks: the others wait for this one
            problem = str(error)
        self._agree(problem)
        if before is not None and self.ranks.rank == 0:
            shutil.rmtree(before.folder, ignore_errors=True)
        counts = {"generation/restarts": float(self.restarts), "generation/asked_again": float(self.asked_again)}
        self.restarts = self.asked_again = 0
        return {"time/synchronise": time.perf_counter() - started, **counts}

    def _write(self) -> str | None:
        """Writes the trained weights, on rank 0, and stores their checksums. Returns an error message or None."""
        module, problem, ledger = self.policy.module, None, SentWeights()
        if not self.frozen:
            self.frozen = {name: checksum(value) for name, value in weights(module, trained=False)}
        number = 1 if self.current is None else self.current.number + 1
        folder, tensors = self.exchange.path / f"weights-{number}", ledger.recorded(weights(module, trained=True))
        if self.ranks.rank == 0:
            try:
                if number == 1:
                    self._claim()
                write_weights(folder, tensors)
            except (OSError, SafetensorError) as error:
                problem = f"{folder} cannot be written ({error}); set rollout.workers.exchange to another folder"
        for _ in tensors:  # parts may have to be gathered from all ranks
            pass
        self.current = WorkerWeights(number, folder, ledger.sent, self._controls.state())
        return problem

    def _claim(self) -> None:
        """Creates the folder of weights, and removes those of runs that have ended."""
        for removed in remove_abandoned(self.folder):
            print(f"removed {removed}: weights of a run that has ended", flush=True)
        self.exchange.claim()

    def _agree(self, problem: str | None) -> None:
        """Raises UserError on all ranks if one of them has a problem. Collective."""
        if error := next((error for error in self.ranks.gather(problem) if error), None):
            raise UserError(error)

    # --- one worker ---

    def _bring_up(self, handle: Handle) -> None:
        """Starts the worker unless it runs, and sends it the present weights unless it has them. Raises Lost and
        UserError."""
        assert self.current is not None
        started = not handle.child.up
        if started:
            handle.child.start()
            handle.ask(self._setup, self.settings.timeout)
        if handle.weights == self.current.number:
            return
        frozen = self.frozen if started else {}
        request = {"weights": str(self.current.folder), "frozen": list(frozen), "controls": self.current.controls}
        answer = handle.ask(encode(request), self.settings.timeout)["checksums"]
        trained = {name: Checksum(*value) for name, value in answer.items()}
        compare(handle.number, frozen, {name: trained.pop(name) for name in frozen if name in trained}, trained=False)
        compare(handle.number, self.current.checksums, trained, trained=True)
        handle.weights = self.current.number

    def _ask(self, handle: Handle, message: bytes | None, shared: Sequence[Any] = ()) -> Any:
        """Sends the worker the present weights, and then the message, whose answer is returned; None: no message. A
        worker that ends is restarted. Raises UserError if it ends ATTEMPTS times."""
        last = ""
        for _ in range(ATTEMPTS):
            try:
                self._bring_up(handle)
                return None if message is None else handle.ask(message, self.settings.timeout, shared)
            except Lost as error:
                last = str(error)
                handle.stop()
                with self._lock:
                    self.restarts += 1
                    self.asked_again += message is not None
                print(printable(f"rollout worker {handle.number}: {last}; restarting it"), flush=True)
        raise UserError(f"rollout worker {handle.number} ended or did not answer {ATTEMPTS} times in a row: {last}")

    # --- prompts ---

    def rollout(self, prompts: Sequence[Prompt], group_size: int, seeds: Sequence[int], *, step: int = 0) -> Rollouts:
        """Returns rollouts like `Policy.rollout`, with `behaviour_logp` if batches are sampled ahead of training."""
        options = {"step": step, "likelihoods": self.settings.async_steps > 0}
        parts: list[Rollouts] = self._distribute(prompts, group_size, seeds, {"rollout": group_size, **options})
        group = torch.arange(len(prompts)).repeat_interleave(group_size)
        return replace(Rollouts.concat(parts), group=group)

    def respond(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Sample]:
        """Returns responses like `Policy.respond`."""
        return [sample for part in self._distribute(prompts, 1, seeds, {"respond": True}) for sample in part]

    def counts(self) -> dict[str, float]:
        """Returns the policy's counts of events by name: the larger of the count in this process and the workers'
        count, since a truncated prompt is counted once in each."""
        local = self.policy.counts()
        with self._lock:
            remote, self._counted = self._counted, {}
        return {name: max(local.get(name, 0.0), remote.get(name, 0.0)) for name in {**local, **remote}}

    def _distribute(
        self, prompts: Sequence[Prompt], group_size: int, seeds: Sequence[int], request: dict[str, Any]
    ) -> list[Any]:
        """Sends each worker its share of the prompts, with the keys of `request`. Returns their results in order."""
        parts = shares(len(prompts), len(self.handles))

        def ask(number: int) -> dict[str, Any]:
            """Sends worker `number` its share of prompts and seeds. Returns its answer."""
            first, last = parts[number]
            share = list(prompts[first:last])
            share_seeds = [int(seed) for seed in seeds[first * group_size : last * group_size]]
            try:
                message = encode({**request, "prompts": share, "seeds": share_seeds})
            except TypeError as error:
                raise UserError(
                    f"a prompt between {share[0].id} and {share[-1].id} holds {error}, which cannot be sent to "
                    "workers; set rollout.workers=null"
                ) from None
            return self._ask(self.handles[number], message, shared_objects(share))

        with ThreadPoolExecutor(len(parts)) as threads:
            answers = list(threads.map(ask, range(len(parts))))
        with self._lock:
            for answer in answers:
                for name, count in answer["counts"].items():
                    self._counted[name] = self._counted.get(name, 0.0) + count
        return [answer["result"] for answer in answers]

    def close(self) -> None:
        """Ends the workers and removes the folder of weights."""
        for handle in self.handles:
            handle.stop()
        if self.ranks.rank == 0:
            self.exchange.clear()


def launched(settings: RolloutWorkers, logs: Sequence[Path]) -> list[Launch]:
    """Returns for each worker of this rank a function that starts it, on a GPU of its own if there are GPUs. Raises
    UserError like `WorkerPool`."""
    cuda = torch.cuda.is_available()
    if settings.ray is not None:
        cluster = Cluster(settings.ray, "rollout.workers.ray")
        return [OnCluster(cluster, int(cuda), log=log) for log in logs]
    gpus = devices_of(settings, torch.cuda.device_count()) if cuda else []
    environments = [{devices.VISIBLE: devices.visible_devices([gpu])} for gpu in gpus] or [{}] * len(logs)
    return [OnThisHost(environment=environment, log=log) for environment, log in zip(environments, logs, strict=True)]


def devices_of(settings: RolloutWorkers, visible: int) -> list[int]:
    """Returns the GPU indices of this rank's workers. visible: number of GPUs of the host. Raises UserError if there
    are too few, or if a rank trains on one of them."""
    ranks, first = devices.local_ranks(), settings.first_device
    if first < ranks:
        raise UserError(
            f"rollout.workers.first_device={first} is a GPU that a rank trains on; set it to {ranks} or more"
        )
    if (needed := first + ranks * settings.count) > visible:
        raise UserError(
            f"rollout.workers.count={settings.count} for each of {ranks} ranks, from rollout.workers.first_device="
            f"{first} on, needs {needed} GPUs, but this host has {visible}; lower one of them"
        )
    start = first + devices.local_rank() * settings.count
    return list(range(start, start + settings.count))


def shares(prompts: int, workers: int) -> list[tuple[int, int]]:
    """Returns start and end index of each worker's prompts, in shares as equal as possible, none of them empty."""
    count = min(prompts, workers)
    return [(i * prompts // count, (i + 1) * prompts // count) for i in range(count)]


def weights(module: nn.Module, *, trained: bool) -> Iterator[tuple[str, Tensor]]:
    """Yields names and copies of the parameters that are trained, or that are not. Under ZeRO-3 all ranks must
    call it, since each parameter is gathered."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad == trained:
            with gathered_parameters([parameter]):
                value = parameter.detach().clone()
            yield name, value


def compare(worker: int, expected: dict[str, Checksum], actual: dict[str, Checksum], *, trained: bool) -> None:
    """Raises UserError if the checksum of a tensor in a worker is missing or differs from the trainer's. trained:
    whether these weights were sent to the worker; it builds the others itself."""
    wrong = [*differing(expected, actual), *absent(expected, actual)]
    if not wrong:
        return
    if trained:
        raise UserError(f"rollout worker {worker}: {wrong[0]} differs from what was sent; set rollout.workers=null")
    raise UserError(
        f"rollout worker {worker}: {wrong[0]}, which is not trained, differs from the training process's: a policy has "
        "to be the same each time it is built; see model.path and model.build, or set rollout.workers=null"
    )

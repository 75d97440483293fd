"""Workers that sample in place of the training process: they get its weights, prove it, and share its prompts."""

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
from mmrl.engine import Ranks, gathered
from mmrl.errors import UserError
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
from mmrl.workers.worker import objects_of

ATTEMPTS = 3  # starts of a worker for one request


@dataclass(frozen=True)
class WorkerWeights:
    """What workers have, or are about to get. number: from 1. given: checksums of what is in the folder."""

    number: int
    folder: Path
    given: dict[str, Checksum]
    controls: dict[str, dict[str, float]]


class WorkerPool:
    """The workers of a rank. It is asked for rollouts and answers as the policy is, and makes the same: each prompt's
    depend on its seeds and the weights alone. With one worker they are the same to the bit, with several to rounding,
    for a worker's batch is its share of the prompts.

    What a worker had when it ended is asked again, after it was started again. Methods are called by one thread at a
    time; `synchronise` is a collective.
    """

    def __init__(self, config: Config, settings: RolloutWorkers, policy: Policy, ranks: Ranks, *, builder: str) -> None:
        """Starts nothing yet. builder: "package.module:function" that makes configuration and policy of a job's tree,
        in a worker. Raises UserError where there are too few GPUs, or no such cluster."""
        self.config, self.settings, self.policy, self.ranks = config, settings, policy, ranks
        self.folder = Path(settings.exchange or Path(config.run_dir) / "workers").absolute()
        logs = Path(config.run_dir) / "workers"
        first = ranks.rank * settings.count
        files = [logs / f"worker-{first + i}.log" for i in range(settings.count)]
        self.handles = [Handle(i, *own) for i, own in enumerate(zip(files, launched(settings, files), strict=True))]
        self.exchange = Exchange(self.folder, ranks.gather(uuid4().hex[:8])[0])
        self.current: WorkerWeights | None = None
        self.frozen: dict[str, Checksum] = {}
        self.restarts = self.asked_again = 0
        self._controls = Schedules(config)
        self._order = encode({"config": plain(without_workers(config)), "folder": str(Path.cwd()), "builder": builder})
        self._counted: dict[str, float] = {}
        self._books = threading.Lock()  # on all that is counted

    # --- weights ---

    @contextmanager
    def generation(self) -> Iterator[dict[str, float]]:
        """Inside it workers have the weights of now. Gives metrics."""
        yield self.synchronise()

    def synchronise(self) -> dict[str, float]:
        """Gives all workers the trained weights of now. Collective. Raises UserError, on all ranks, if one of them has
        others afterwards."""
        started, before = time.perf_counter(), self.current
        self._agree(self._write())
        problem = None
        try:
            with ThreadPoolExecutor(len(self.handles)) as threads:
                list(threads.map(lambda handle: self._ask(handle, None), self.handles))
        except UserError as error:  # the other ranks wait
            problem = str(error)
        self._agree(problem)
        if before is not None and self.ranks.rank == 0:
            shutil.rmtree(before.folder, ignore_errors=True)
        counts = {"generation/restarts": float(self.restarts), "generation/asked_again": float(self.asked_again)}
        self.restarts = self.asked_again = 0
        return {"time/synchronise": time.perf_counter() - started, **counts}

    def _write(self) -> str | None:
        """Writes what is trained, on rank 0, and remembers checksums; what went wrong."""
        module, problem, ledger = self.policy.module, None, SentWeights()
        if not self.frozen:
            self.frozen = {name: checksum(value) for name, value in weights(module, trained=False)}
        number = 1 if self.current is None else self.current.number + 1
        folder, given = self.exchange.path / f"weights-{number}", ledger.recorded(weights(module, trained=True))
        if self.ranks.rank == 0:
            try:
                if number == 1:
                    self._claim()
                write_weights(folder, given)
            except (OSError, SafetensorError) as error:
                problem = f"{folder} can not be written ({error}); rollout.workers.exchange names another folder"
        for _ in given:  # parts may have to be gathered from all ranks
            pass
        self.current = WorkerWeights(number, folder, ledger.sent, self._controls.state())
        return problem

    def _claim(self) -> None:
        for left in remove_abandoned(self.folder):
            print(f"removed {left}, weights that a run which has ended left behind", flush=True)
        self.exchange.claim()

    def _agree(self, problem: str | None) -> None:
        """Raises UserError on all ranks where one has a problem."""
        if found := next((found for found in self.ranks.gather(problem) if found), None):
            raise UserError(found)

    # --- one worker ---

    def _bring_up(self, handle: Handle) -> None:
        """Starts it where it does not run, and gives it the weights of now where it has others. Raises Lost and
        UserError."""
        assert self.current is not None
        fresh = not handle.child.up
        if fresh:
            handle.child.start()
            handle.ask(self._order, self.settings.timeout)
        if handle.weights == self.current.number:
            return
        frozen = self.frozen if fresh else {}
        order = {"take": str(self.current.folder), "also": list(frozen), "controls": self.current.controls}
        held = handle.ask(encode(order), self.settings.timeout)["held"]
        found = {name: Checksum(*value) for name, value in held.items()}
        compare(handle.number, frozen, {name: found.pop(name) for name in frozen if name in found}, trained=False)
        compare(handle.number, self.current.given, found, trained=True)
        handle.weights = self.current.number

    def _ask(self, handle: Handle, message: bytes | None, shared: Sequence[Any] = ()) -> Any:
        """What it answers to a message, with the weights of now; it is started again as often as it may be. Raises
        UserError."""
        last = ""
        for _ in range(ATTEMPTS):
            try:
                self._bring_up(handle)
                return None if message is None else handle.ask(message, self.settings.timeout, shared)
            except Lost as error:
                last = str(error)
                handle.stop()
                with self._books:
                    self.restarts += 1
                    self.asked_again += message is not None
                print(f"rollout worker {handle.number}: {last}; starting it again", flush=True)
        raise UserError(f"rollout worker {handle.number} was lost {ATTEMPTS} times in a row: {last}")

    # --- prompts ---

    def rollout(self, prompts: Sequence[Prompt], group_size: int, seeds: Sequence[int], *, step: int = 0) -> Rollouts:
        """As the policy's own. Batches that are made ahead of training bring `behaviour_logp` along."""
        more = {"step": step, "likelihoods": self.settings.async_steps > 0}
        parts: list[Rollouts] = self._shared(prompts, group_size, seeds, {"rollout": group_size, **more})
        group = torch.arange(len(prompts)).repeat_interleave(group_size)
        return replace(Rollouts.concat(parts), group=group)

    def respond(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Sample]:
        """As the policy's own."""
        return [sample for part in self._shared(prompts, 1, seeds, {"respond": True}) for sample in part]

    def counts(self) -> dict[str, float]:
        """Those of the policy in this process and of workers, of each the larger: a prompt that was cut is noticed in
        both."""
        own = self.policy.counts()
        with self._books:
            theirs, self._counted = self._counted, {}
        return {name: max(own.get(name, 0.0), theirs.get(name, 0.0)) for name in {**own, **theirs}}

    def _shared(
        self, prompts: Sequence[Prompt], group_size: int, seeds: Sequence[int], order: dict[str, Any]
    ) -> list[Any]:
        """What workers make of prompts, each of its share of them, in order."""
        parts = shares(len(prompts), len(self.handles))

        def ask(number: int) -> Any:
            first, last = parts[number]
            own = list(prompts[first:last])
            drawn = [int(seed) for seed in seeds[first * group_size : last * group_size]]
            try:
                message = encode({**order, "prompts": own, "seeds": drawn})
            except TypeError as error:
                raise UserError(
                    f"a prompt between {own[0].id} and {own[-1].id} holds {error}, which can not be sent to workers; "
                    "set rollout.workers=null"
                ) from None
            return self._ask(self.handles[number], message, objects_of(own))

        with ThreadPoolExecutor(len(parts)) as threads:
            answers = list(threads.map(ask, range(len(parts))))
        with self._books:
            for answer in answers:
                for name, count in answer["counts"].items():
                    self._counted[name] = self._counted.get(name, 0.0) + count
        return [answer["made"] for answer in answers]

    def close(self) -> None:
        for handle in self.handles:
            handle.stop()
        if self.ranks.rank == 0:
            self.exchange.clear()


def launched(settings: RolloutWorkers, logs: Sequence[Path]) -> list[Launch]:
    """Says how each worker of this process is started. Raises UserError as `WorkerPool`."""
    there = torch.cuda.is_available()
    if settings.ray is not None:
        cluster = Cluster(settings.ray, "rollout.workers.ray")
        return [OnCluster(cluster, int(there), log=log) for log in logs]
    gpus = devices_of(settings, torch.cuda.device_count()) if there else []
    seen = [{devices.VISIBLE: devices.names([gpu])} for gpu in gpus] or [{}] * len(logs)
    return [OnThisHost(environment=own, log=log) for own, log in zip(seen, logs, strict=True)]


def devices_of(settings: RolloutWorkers, visible: int) -> list[int]:
    """The GPUs of this rank's workers, of as many as the host shows. Raises UserError where they are too few, or a
    rank's own."""
    ranks, first = devices.local_ranks(), settings.first_device
    if first < ranks:
        raise UserError(
            f"rollout.workers.first_device={first} is a GPU that a rank trains on; set it to {ranks} or more"
        )
    if (needed := first + ranks * settings.count) > visible:
        raise UserError(
            f"rollout.workers.count={settings.count} for each of {ranks} ranks, from rollout.workers.first_device="
            f"{first} on, needs {needed} GPUs, and this host shows {visible}"
        )
    mine = first + devices.local_rank() * settings.count
    return list(range(mine, mine + settings.count))


def shares(prompts: int, workers: int) -> list[tuple[int, int]]:
    """First and last place of each worker's prompts, as equal as can be; none is empty."""
    count = min(prompts, workers)
    return [(i * prompts // count, (i + 1) * prompts // count) for i in range(count)]


def weights(module: nn.Module, *, trained: bool) -> Iterator[tuple[str, Tensor]]:
    """Parameters that are trained, or those that are not, as copies. Under ZeRO-3 each is gathered, by all ranks."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad == trained:
            with gathered([parameter]):
                value = parameter.detach().clone()
            yield name, value


def compare(worker: int, given: dict[str, Checksum], held: dict[str, Checksum], *, trained: bool) -> None:
    """Raises UserError for a tensor that a worker has otherwise than the trainer."""
    wrong = [*differing(given, held), *absent(given, held)]
    if not wrong:
        return
    if trained:
        raise UserError(f"rollout worker {worker} has {wrong[0]} otherwise than it was sent; set rollout.workers=null")
    raise UserError(
        f"rollout worker {worker} has built {wrong[0]} otherwise than the training process, and it is not trained: a "
        "policy has to be the same each time it is built; see model.path and model.build, or set rollout.workers=null"
    )

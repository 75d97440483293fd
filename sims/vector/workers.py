"""Any simulator in processes of its own, so that one that dies or hangs costs the episodes it was playing and no more.

Each worker is a `mmrl.children.child.Child`, a fresh interpreter here or where Ray placed it, whose `SimulatorService`
makes the simulator for its share of the rows and keeps it until `close`. Nothing is pickled in either direction.
"""

from __future__ import annotations

import json
import logging
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmrl.children.child import Child, Launch, OnCluster, OnThisHost, Raised
from mmrl.children.frames import encode
from mmrl.children.ray import Cluster
from mmrl.errors import UserError
from mmrl.runtime import devices
from mmrl.sims.vector.transitions import ARRAYS, Transition

SILENT_S = (
    60.0  # without a sign of life a worker counts as stopped; a compiler of shaders may hold Python for some time
)
START_S = 300.0  # until a simulator is made, on a busy machine
LEAVE_S = 10.0  # for a simulator to close itself
SERVICE = "mmrl.sims.vector.service:SimulatorService"

_log = logging.getLogger(__name__)


class SimulatorError(RuntimeError):
    """Raised for an error of a row in its worker, or where the worker was replaced."""


class Workers:
    """The simulator `name` with `count` rows shared out to `workers` processes; itself a `Simulator`.

    options: of the simulator; numbers, text, lists and dicts, since they travel as JSON.
    deadline_s: seconds that one reset, one chunk of actions or one plan of the expert may take. A worker that takes
        longer, raises or ends is killed and replaced: the episodes of its rows are lost and reported in
        `Transition.errors`, the rows of other workers go on, and the next reset finds a new worker.
    python: the interpreter of the workers, where a simulator needs an environment of its own. mmrl must be importable
        there; its dependencies are not needed.
    ray: address of a Ray cluster, or "auto", on whose hosts the workers play; None: on this host. The simulator must be
        importable there, and its worker takes one CPU. A host that is lost costs the episodes it was playing.
    restarts: how many workers had to be replaced.

    Raises UserError for options that are not JSON, for what the simulator itself refuses, for a cluster that is not
    there or has no room, and if a worker does not start.
    """

    def __init__(
        self,
        name: str,
        count: int,
        options: Mapping[str, Any],
        *,
        workers: int,
        deadline_s: float = 120.0,
        python: str | None = None,
        ray: str | None = None,
    ):
        if not 1 <= workers <= count:
            raise UserError(f"simulator {name!r}: workers must be 1 to {count} (the environments), not {workers}")
        if deadline_s <= 0:
            raise UserError(f"simulator {name!r}: deadline_s must be positive, not {deadline_s:g}")
        if python is not None and ray is None and shutil.which(python) is None:
            raise UserError(f"simulator {name!r}: there is no interpreter at {python}")
        try:
            options = json.loads(json.dumps(dict(options)))
        except TypeError as error:
            raise UserError(f"simulator {name!r}: behind workers, options travel as JSON: {error}") from error
        self.count, shares = count, np.array_split(np.arange(count), workers)
        self._home = [(w, local) for w, share in enumerate(shares) for local in range(len(share))]
        recipe = {"name": name, "options": options}
        launch = launched(name, python, ray)
        self._workers = [SimulatorWorker(recipe | {"count": len(share)}, deadline_s, launch) for share in shares]
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="simulator")
        self._reported_restarts, self._lock = 0, threading.Lock()  # restarts that transitions have reported
        try:
            first, *_ = self._pool.map(SimulatorWorker.ready, self._workers)
        except UserError:
            self.close()
            raise
        except SimulatorError as error:
            self.close()
            raise UserError(f"simulator {name!r}: a worker does not start: {error}") from error
        self.action_dim, self.state_dim = first["action_dim"], first["state_dim"]
        self.image_shape, self.tasks = tuple(first["image_shape"]), tuple(first["tasks"])
        self.cameras = tuple(first["cameras"])
        bounds = first["action_bounds"]
        self.action_bounds = None if bounds is None else (np.array(bounds[0]), np.array(bounds[1]))

    @property
    def restarts(self) -> int:
        return sum(worker.restarts for worker in self._workers)

    @property
    def pids(self) -> list[int]:
        """The running processes, each on its own host."""
        return [worker.child.process.pid for worker in self._workers]

    def shares(self, count: int) -> list[NDArray[np.int64]]:
        """Returns `count` sets of rows, each of some workers, which different threads may step at once."""
        home = np.array([worker for worker, _ in self._home])
        return [
            np.flatnonzero(np.isin(home, workers)) for workers in np.array_split(np.arange(len(self._workers)), count)
        ]

    def reset(self, rows: Sequence[int], seeds: Sequence[int], tasks: Sequence[str]) -> Transition:
        def start(worker: SimulatorWorker, picked: list[int], local: list[int]) -> dict[str, Any]:
            fields = {"seeds": [int(seeds[i]) for i in picked], "tasks": [tasks[i] for i in picked]}
            reply = worker.ask("reset", rows=local, **fields)
            worker.instructions |= dict(zip(local, reply["instructions"], strict=True))
            return reply

        return self._moved(rows, 0, {}, start)

    def step(self, rows: Sequence[int], actions: NDArray[np.float64]) -> Transition:
        def move(worker: SimulatorWorker, picked: list[int], local: list[int]) -> dict[str, Any]:
            return worker.ask("step", rows=local, actions=actions[picked])

        homes = [self._home_of(row) for row in rows]
        lost = {i: worker.fault for i, (worker, local) in enumerate(homes) if local not in worker.instructions}
        errors = {i: SimulatorError(f"its worker was replaced: {fault}") for i, fault in lost.items()}
        return self._moved(rows, actions.shape[1], errors, move)

    def instruction(self, row: int) -> str:
        worker, local = self._home_of(row)
        return worker.instructions[local]

    def expert(self, rows: Sequence[int], length: int) -> NDArray[np.float32]:
        """Returns actions as `Simulator.expert`; 0 for rows whose worker fails, whose loss the next step reports."""
        actions = np.zeros((len(rows), length, self.action_dim), np.float32)

        def plan(worker: SimulatorWorker, picked: list[int], local: list[int]) -> None:
            if all(row in worker.instructions for row in local):
                with suppress(SimulatorError):
                    actions[picked] = worker.ask("expert", rows=local, length=length)["actions"]

        self._each(range(len(rows)), rows, plan)
        return actions

    def close(self) -> None:
        for worker in self._workers:
            worker.child.hang_up()
        for worker in self._workers:
            worker.close()
        self._workers = []
        self._pool.shutdown()

    def _moved(
        self,
        rows: Sequence[int],
        length: int,
        lost: Mapping[int, SimulatorError],
        ask: Callable[[SimulatorWorker, list[int], list[int]], Mapping[str, Any]],
    ) -> Transition:
        """Merges the transitions of the workers' rows. lost: errors of rows that are not stepped, by index in
        `rows`."""
        out = Transition.empty(len(rows), length, self.image_shape, self.state_dim)
        out.errors = [lost.get(i) for i in range(len(rows))]

        def merge(worker: SimulatorWorker, picked: list[int], local: list[int]) -> None:
            try:
                _merge(ask(worker, picked, local), out, picked)
            except SimulatorError as error:
                for i in picked:
                    out.errors[i] = error

        self._each([i for i in range(len(rows)) if i not in lost], rows, merge)
        with self._lock:
            now = self.restarts
            out.restarts, self._reported_restarts = now - self._reported_restarts, now
        return out

    def _home_of(self, row: int) -> tuple[SimulatorWorker, int]:
        """Returns the worker of a row, and the number of the row in that worker."""
        if not self._workers:
            raise UserError("these simulator workers were closed")
        worker, local = self._home[row]
        return self._workers[worker], local

    def _each(
        self,
        indices: Sequence[int],
        rows: Sequence[int],
        function: Callable[[SimulatorWorker, list[int], list[int]], None],
    ) -> None:
        """Calls function(worker, indices in `rows`, numbers of the rows in the worker) for all workers at once that
        have rows at `indices`."""
        shares: dict[SimulatorWorker, tuple[list[int], list[int]]] = {}
        for i in indices:
            worker, local = self._home_of(rows[i])
            picked, local_rows = shares.setdefault(worker, ([], []))
            picked.append(i)
            local_rows.append(local)
        waiting = [self._pool.submit(function, worker, *share) for worker, share in shares.items()]
        for future in waiting:
            future.result()


class SimulatorWorker:
    """A worker process with its rows. It is started at once and awaited at the first request.

    instructions: of the rows that have begun an episode in this process. fault: why the last one was replaced.
    """

    def __init__(self, recipe: dict[str, Any], deadline_s: float, launch: Launch):
        self.recipe, self.deadline_s, self.fault = recipe, deadline_s, ""
        self.child = Child(SERVICE, launch, records=())
        self._start()

    @property
    def restarts(self) -> int:
        return self.child.starts - 1

    def _start(self) -> None:
        self.instructions: dict[int, str] = {}
        self._facts: dict[str, Any] | None = None
        self.child.start()

    def ready(self) -> dict[str, Any]:
        """Awaits the simulator; returns its attributes."""
        if self._facts is None:
            self._facts = self._exchange(self.recipe, START_S, START_S)  # it is silent until Python is up
        return self._facts

    def ask(self, kind: str, **fields: object) -> dict[str, Any]:
        """Returns the reply to a request. Raises SimulatorError if there is none, after starting another worker in its
        place; UserError if the simulator refuses the request."""
        if (code := self.child.process.poll()) is not None:  # a caller that starts an episode loses nothing
            self._replace(f"its process ended with {code}")
            if kind != "reset":
                raise SimulatorError(self.fault)
        self.ready()
        return self._exchange({"kind": kind, **fields}, self.deadline_s, SILENT_S)

    def close(self) -> None:
        self.child.stop(LEAVE_S if self._facts is not None else 0)

    def _exchange(self, fields: dict[str, Any], limit_s: float, silent_s: float) -> dict[str, Any]:
        try:
            return self.child.ask(encode(fields), limit_s, silent_s=silent_s)
        except (ConnectionError, TimeoutError, Raised) as error:
            self._replace(str(error))
            raise SimulatorError(self.fault) from error

    def _replace(self, why: str) -> None:
        self.fault = why
        _log.warning(
            "simulator %s: a worker of %d rows is replaced: %s", self.recipe["name"], self.recipe["count"], why
        )
        self.child.stop()
        self._start()


def launched(name: str, python: str | None, ray: str | None) -> Launch:
    """Returns the launcher of each worker; see `Workers`."""
    if ray is None:
        return OnThisHost(python, devices.child_environment())
    return OnCluster(Cluster(ray, f"simulator {name!r}: ray"), python=python)


def _merge(reply: Mapping[str, Any], out: Transition, picked: Sequence[int]) -> None:
    """Raises SimulatorError for a worker whose simulator has other dimensions than the first one's."""
    for name in ARRAYS:
        target, array = vars(out)[name], reply[name]
        if array.shape != (len(picked), *target.shape[1:]):
            raise SimulatorError(f"{name} of shape {array.shape}, where another worker has {target.shape[1:]} a row")
        target[picked] = array
    for i, text in zip(picked, reply["errors"], strict=True):
        out.errors[i] = None if text is None else SimulatorError(text)

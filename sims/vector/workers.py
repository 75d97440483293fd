"""Simulators in worker processes, so that a simulator that crashes or hangs loses only the episodes of its rows.

Each worker is a `mmrl.children.child.Child`: a new Python process on this host, or where Ray placed it. Its
`SimulatorService` makes the simulator for its rows and keeps it until `close`. Nothing is pickled.
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

SILENT_S = 60.0  # a worker without a heartbeat for so long counts as hung; compiling shaders can block Python for long
START_S = 300.0  # time limit of making a simulator, on a busy machine
LEAVE_S = 10.0  # time limit of closing a simulator
SERVICE = "mmrl.sims.vector.service:SimulatorService"

_log = logging.getLogger(__name__)


class SimulatorError(RuntimeError):
    """Raised for an error of a row in its worker, or if the worker was replaced."""


class Workers:
    """The simulator `name` with `count` rows, divided among `workers` processes. It is a `Simulator` itself.

    options: keyword arguments of the simulator: numbers, text, lists and dicts, since they are sent as JSON.
    deadline_s: time limit of a reset, a chunk of actions or a call of the expert. A worker that takes longer, raises or
        ends is replaced. The episodes of its rows are lost and reported in `Transition.errors`; other workers continue.
    python: the workers' Python interpreter, for a simulator in another virtual environment. mmrl must be importable
        there, but not its dependencies.
    ray: the address of a Ray cluster whose hosts run the workers, or "auto"; None: this host. The simulator must be
        importable there, and each worker takes one CPU.
    restarts: the number of workers that were replaced.

    Raises UserError for options that are not JSON, for errors of the simulator's constructor, for a cluster that cannot
    be reached or has no free CPUs, and if a worker does not start.
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
        """Starts the workers and waits until all are ready. name, count, options: see `mmrl.sims.build`; others: see
        the class. Raises UserError for wrong arguments, and if a worker cannot start."""
        if not 1 <= workers <= count:
            raise UserError(
                f"simulator {name!r}: workers must be from 1 to {count}, the number of environments, not {workers}"
            )
        if deadline_s <= 0:
            raise UserError(f"simulator {name!r}: deadline_s must be positive, not {deadline_s:g}")
        if python is not None and ray is None and shutil.which(python) is None:
            raise UserError(
                f"simulator {name!r}: there is no Python interpreter at {python}; set python to the path of one"
            )
        try:
            options = json.loads(json.dumps(dict(options)))
        except TypeError as error:
            raise UserError(f"simulator {name!r}: with workers, its options must be valid JSON: {error}") from error
        self.count, shares = count, np.array_split(np.arange(count), workers)
        # for each row: the index of its worker, and its number in that worker
        self._workers_and_rows = [(w, local) for w, share in enumerate(shares) for local in range(len(share))]
        recipe = {"name": name, "options": options}
        launch = make_launcher(name, python, ray)
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
            raise UserError(f"simulator {name!r}: a worker cannot start: {error}") from error
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
        """Divides the rows into `count` shares by worker, so that different threads may step different shares."""
        worker_of_row = np.array([worker for worker, _ in self._workers_and_rows])
        return [
            np.flatnonzero(np.isin(worker_of_row, workers))
            for workers in np.array_split(np.arange(len(self._workers)), count)
        ]

    def reset(self, rows: Sequence[int], seeds: Sequence[int], tasks: Sequence[str]) -> Transition:
        """Starts an episode in each of `rows`, in all workers in parallel; see `Simulator.reset`."""

        def reset_rows(worker: SimulatorWorker, indices: list[int], local_rows: list[int]) -> dict[str, Any]:
            """Resets some rows of one worker. indices: their positions in `rows`; local_rows: their numbers there."""
            fields = {"seeds": [int(seeds[i]) for i in indices], "tasks": [tasks[i] for i in indices]}
            reply = worker.ask("reset", rows=local_rows, **fields)
            worker.instructions |= dict(zip(local_rows, reply["instructions"], strict=True))
            return reply

        return self._gather(rows, 0, {}, reset_rows)

    def step(self, rows: Sequence[int], actions: NDArray[np.float64]) -> Transition:
        """Executes actions [row, chunk, action] in all workers in parallel; see `Simulator.step`. A row whose worker
        was replaced during its episode gets an error."""

        def step_rows(worker: SimulatorWorker, indices: list[int], local_rows: list[int]) -> dict[str, Any]:
            """Steps some rows of one worker. indices: their positions in `rows`; local_rows: their numbers there."""
            return worker.ask("step", rows=local_rows, actions=actions[indices])

        workers_and_rows = [self._worker_and_row(row) for row in rows]
        # A worker that was replaced has no instruction of a row until that row is reset.
        lost = {
            i: worker.fault for i, (worker, local) in enumerate(workers_and_rows) if local not in worker.instructions
        }
        errors = {i: SimulatorError(f"its worker was replaced: {fault}") for i, fault in lost.items()}
        return self._gather(rows, actions.shape[1], errors, step_rows)

    def instruction(self, row: int) -> str:
        worker, local = self._worker_and_row(row)
        return worker.instructions[local]

    def expert(self, rows: Sequence[int], length: int) -> NDArray[np.float32]:
        """Returns actions as `Simulator.expert`. Rows whose worker fails get 0; the next step reports that
        their episodes are lost."""
        actions = np.zeros((len(rows), length, self.action_dim), np.float32)

        def plan(worker: SimulatorWorker, indices: list[int], local_rows: list[int]) -> None:
            """Writes the actions for rows of one worker into `actions`, unless it fails or was replaced."""
            if all(row in worker.instructions for row in local_rows):
                with suppress(SimulatorError):
                    actions[indices] = worker.ask("expert", rows=local_rows, length=length)["actions"]

        self._each(range(len(rows)), rows, plan)
        return actions

    def close(self) -> None:
        """Ends all workers. All connections are closed first, so that they end at the same time."""
        for worker in self._workers:
            worker.child.hang_up()
        for worker in self._workers:
            worker.close()
        self._workers = []
        self._pool.shutdown()

    def _gather(
        self,
        rows: Sequence[int],
        length: int,
        lost: Mapping[int, SimulatorError],
        ask: Callable[[SimulatorWorker, list[int], list[int]], Mapping[str, Any]],
    ) -> Transition:
        """Calls ask(worker, indices in `rows`, numbers of these rows in the worker) for each worker with rows, and
        merges the replies into one transition of `length` actions. lost: by index in `rows`, the errors of rows that
        are left out."""
        out = Transition.empty(len(rows), length, self.image_shape, self.state_dim)
        out.errors = [lost.get(i) for i in range(len(rows))]

        def merge(worker: SimulatorWorker, indices: list[int], local_rows: list[int]) -> None:
            """Asks one worker and writes its reply to `out`, or its error to each of its rows."""
            try:
                _merge(ask(worker, indices, local_rows), out, indices)
            except SimulatorError as error:
                for i in indices:
                    out.errors[i] = error

        self._each([i for i in range(len(rows)) if i not in lost], rows, merge)
        with self._lock:
            now = self.restarts
            out.restarts, self._reported_restarts = now - self._reported_restarts, now
        return out

    def _worker_and_row(self, row: int) -> tuple[SimulatorWorker, int]:
        """Returns the worker of a row, and the number of the row in that worker."""
        if not self._workers:
            raise UserError("these simulator workers were closed; make new ones")
        worker, local = self._workers_and_rows[row]
        return self._workers[worker], local

    def _each(
        self,
        indices: Sequence[int],
        rows: Sequence[int],
        function: Callable[[SimulatorWorker, list[int], list[int]], None],
    ) -> None:
        """Calls function(worker, indices in `rows`, numbers of these rows in the worker) in parallel for each worker
        that has some of the rows at `indices`."""
        shares: dict[SimulatorWorker, tuple[list[int], list[int]]] = {}
        for i in indices:
            worker, local = self._worker_and_row(rows[i])
            worker_indices, local_rows = shares.setdefault(worker, ([], []))
            worker_indices.append(i)
            local_rows.append(local)
        waiting = [self._pool.submit(function, worker, *share) for worker, share in shares.items()]
        for future in waiting:
            future.result()


class SimulatorWorker:
    """A worker process with its rows. Construction starts it; the first request waits until it is ready.

    instructions: by row, for the rows with an episode in this process. fault: why the previous process was replaced.
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
        """Waits until the simulator is made. Returns its attributes."""
        if self._facts is None:
            self._facts = self._exchange(self.recipe, START_S, START_S)  # no heartbeat comes until Python has started
        return self._facts

    def ask(self, kind: str, **fields: object) -> dict[str, Any]:
        """Returns the reply to a request. If the worker fails it is replaced, and SimulatorError is raised. Raises
        UserError if the simulator rejects the request."""
        if (code := self.child.process.poll()) is not None:  # a reset can continue in the new process
            self._replace(f"its process ended with {code}")
            if kind != "reset":
                raise SimulatorError(self.fault)
        self.ready()
        return self._exchange({"kind": kind, **fields}, self.deadline_s, SILENT_S)

    def close(self) -> None:
        self.child.stop(LEAVE_S if self._facts is not None else 0)

    def _exchange(self, fields: dict[str, Any], limit_s: float, silent_s: float) -> dict[str, Any]:
        """Sends a request and returns the reply. Replaces the worker and raises SimulatorError if it fails, takes
        longer than `limit_s`, or sends no heartbeat for `silent_s`."""
        try:
            return self.child.ask(encode(fields), limit_s, silent_s=silent_s)
        except (ConnectionError, TimeoutError, Raised) as error:
            self._replace(str(error))
            raise SimulatorError(self.fault) from error

    def _replace(self, reason: str) -> None:
        """Ends the process and starts a new one."""
        self.fault = reason
        _log.warning(
            "simulator %s: a worker of %d environments is replaced: %s",
            self.recipe["name"],
            self.recipe["count"],
            reason,
        )
        self.child.stop()
        self._start()


def make_launcher(name: str, python: str | None, ray: str | None) -> Launch:
    """Returns the launcher of worker processes; arguments as in `Workers`."""
    if ray is None:
        return OnThisHost(python, devices.child_environment())
    return OnCluster(Cluster(ray, f"simulator {name!r}: ray"), python=python)


def _merge(reply: Mapping[str, Any], out: Transition, indices: Sequence[int]) -> None:
    """Writes a worker's reply to the rows `indices` of `out`. Raises SimulatorError if its arrays have other dimensions
    than the first worker's."""
    for name in ARRAYS:
        target, array = vars(out)[name], reply[name]
        if array.shape != (len(indices), *target.shape[1:]):
            expected = (len(indices), *target.shape[1:])
            raise SimulatorError(f"its {name} has shape {array.shape}, but must have {expected}, as in another worker")
        target[indices] = array
    for i, text in zip(indices, reply["errors"], strict=True):
        out.errors[i] = None if text is None else SimulatorError(text)

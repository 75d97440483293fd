"""Any simulator in processes of its own, so that one that dies or hangs costs the episodes it was playing and no more.

Each worker is a fresh interpreter that makes the simulator for its share of the rows and keeps it until `close`.
Messages go over a socket pair, or over TCP where Ray placed the worker on another host, as a JSON header and the plain
bytes of arrays; nothing is pickled in either direction. A busy worker sends a sign of life every second, by which a
stopped process is told from a slow one, and by which a worker notices that nobody is left to answer to.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmrl.errors import UserError, told
from mmrl.runtime import devices
from mmrl.runtime.ray import Cluster, RayProcess, end_with_parent
from mmrl.settings import load_attribute
from mmrl.sims.vector.checks import SimulatorFault, checked_actions, misfit
from mmrl.sims.vector.transitions import Simulator, Transition, cameras_of

BEAT_S = 1.0  # between a busy worker's signs of life
SILENT_S = 60.0  # without one a worker counts as stopped; a compiler of shaders may hold Python for some time
START_S = 300.0  # until a simulator is made, on a busy machine
LEAVE_S = 10.0  # for a simulator to close itself
POLL_S = 0.5  # between two looks at whether a worker that has not called yet still runs
CALL_S = 5.0  # for who calls to say who it is

Message = tuple[dict[str, Any], dict[str, NDArray]]

_ARRAYS = ("images", "state", "reward", "terminated", "truncated", "success", "valid")
_FACTS = ("action_dim", "state_dim", "image_shape", "tasks")
_DTYPES = {"|u1", "|b1", "<f4", "<f8", "<i8"}
_LENGTH = struct.Struct("!Q")
_MAIN = "import sys; from mmrl.sims.vector.workers import serve_here; serve_here(int(sys.argv[1]))"
_MAIN_PLACED = (
    "import sys; from mmrl.sims.vector.workers import serve_there; serve_there(sys.argv[1], int(sys.argv[2]))"
)
_TOKEN = "MMRL_WORKER_TOKEN"  # by which a worker that calls from another host is known; not for others' eyes
_TOKEN_BYTES = 32
_log = logging.getLogger(__name__)


class SimulatorError(RuntimeError):
    """What went wrong in a row, told by its worker; or why its worker had to be replaced."""


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

    Raises UserError for options that are no JSON, for what the simulator itself refuses, for a cluster that is not
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
        cluster = None if ray is None else Cluster(ray, f"simulator {name!r}: ray")
        self._workers = [
            SimulatorWorker({"name": name, "count": len(share), "options": options}, deadline_s, python, cluster)
            for share in shares
        ]
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="simulator")
        self._told, self._telling = 0, threading.Lock()  # restarts that transitions have told of
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

    @property
    def restarts(self) -> int:
        return sum(worker.restarts for worker in self._workers)

    @property
    def pids(self) -> list[int]:
        """The running processes, each on its own host."""
        return [worker.process.pid for worker in self._workers]

    def shares(self, count: int) -> list[NDArray[np.int64]]:
        """`count` sets of rows, each those of some workers, which may be asked things at once by several threads."""
        home = np.array([worker for worker, _ in self._home])
        return [np.flatnonzero(np.isin(home, own)) for own in np.array_split(np.arange(len(self._workers)), count)]

    def reset(self, rows: Sequence[int], seeds: Sequence[int], tasks: Sequence[str]) -> Transition:
        out = Transition.empty(len(rows), 0, self.image_shape, self.state_dim)

        def start(worker: SimulatorWorker, picked: list[int], local: list[int]) -> None:
            fields = {
                "rows": local,
                "seeds": [int(seeds[i]) for i in picked],
                "tasks": [tasks[i] for i in picked],
            }
            try:
                reply, arrays = worker.ask("reset", fields)
                _merge(reply, arrays, out, picked)
            except SimulatorError as error:
                return _spread(error, out, picked)
            worker.instructions |= dict(zip(local, reply["instructions"], strict=True))
            return None

        self._each(rows, start)
        return self._telling_restarts(out)

    def step(self, rows: Sequence[int], actions: NDArray[np.float64]) -> Transition:
        out = Transition.empty(len(rows), actions.shape[1], self.image_shape, self.state_dim)

        def move(worker: SimulatorWorker, picked: list[int], local: list[int]) -> None:
            playing = [row in worker.instructions for row in local]
            for i, plays in zip(picked, playing, strict=True):
                out.errors[i] = None if plays else SimulatorError(f"its worker was replaced: {worker.fault}")
            picked = [i for i, plays in zip(picked, playing, strict=True) if plays]
            if not picked:
                return None
            fields = {"rows": [row for row, plays in zip(local, playing, strict=True) if plays]}
            try:
                return _merge(*worker.ask("step", fields, actions=actions[picked]), out, picked)
            except SimulatorError as error:
                return _spread(error, out, picked)

        self._each(rows, move)
        return self._telling_restarts(out)

    def instruction(self, row: int) -> str:
        worker, local = self._home[row]
        return self._workers[worker].instructions[local]

    def expert(self, rows: Sequence[int], length: int) -> NDArray[np.float32]:
        """As `Simulator.expert`; 0 for rows whose worker fails, whose loss the next step reports."""
        actions = np.zeros((len(rows), length, self.action_dim), np.float32)

        def plan(worker: SimulatorWorker, picked: list[int], local: list[int]) -> None:
            if all(row in worker.instructions for row in local):
                with suppress(SimulatorError):
                    actions[picked] = worker.ask("expert", {"rows": local, "length": length})[1]["actions"]

        self._each(rows, plan)
        return actions

    def close(self) -> None:
        for worker in self._workers:
            worker.dismiss()
        for worker in self._workers:
            worker.close()
        self._workers = []
        self._pool.shutdown()

    def _telling_restarts(self, out: Transition) -> Transition:
        with self._telling:
            now = self.restarts
            out.restarts, self._told = now - self._told, now
        return out

    def _each(self, rows: Sequence[int], function: Callable[[SimulatorWorker, list[int], list[int]], None]) -> None:
        """Calls function(worker, places in `rows`, the worker's own rows) for all workers at once that own any."""
        if not self._workers:
            raise UserError("these simulator workers were closed")
        shares: dict[int, tuple[list[int], list[int]]] = {}
        for i, row in enumerate(rows):
            worker, local = self._home[row]
            picked, own = shares.setdefault(worker, ([], []))
            picked.append(i)
            own.append(local)
        waiting = [self._pool.submit(function, self._workers[w], *share) for w, share in shares.items()]
        for future in waiting:
            future.result()


class SimulatorWorker:
    """One process and the rows that play in it. Started at once, awaited when it is first asked something."""

    def __init__(self, recipe: dict[str, Any], deadline_s: float, python: str | None, cluster: Cluster | None):
        self.recipe, self.deadline_s, self.python, self.cluster = recipe, deadline_s, python, cluster
        self.restarts, self.fault = 0, ""
        self._call: IncomingCall | None = None
        self._start()

    def _start(self) -> None:
        self.instructions: dict[int, str] = {}  # of the rows that have begun an episode in this process
        self._facts: dict[str, Any] | None = None
        self.process: subprocess.Popen | RayProcess
        self._channel: socket.socket | None
        # The same interpreter finds the same modules; another one must not see this one's packages.
        own = self.python in (None, sys.executable)
        if self.cluster is not None:
            self._channel, self._call, self.process = None, IncomingCall(self.cluster.host), self.cluster.place()
            arguments = [*([] if own else ["-E"]), "-c", _MAIN_PLACED, *map(str, self._call.address)]
            self.process.run(arguments, {_TOKEN: self._call.token}, self.python)
            return
        self._channel, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [self.python or sys.executable, "-c", _MAIN, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for the trainer, which then ends the worker
                env=devices.without_launcher(dict(os.environ))
                | devices.of_children()
                | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)) if own else ""},
            )

    def ready(self) -> dict[str, Any]:
        """What the simulator says of itself, once it is made."""
        if self._facts is None:
            self._facts, _ = self._exchange(self.recipe, {}, START_S, START_S)  # it is silent until Python is up
        return self._facts

    def ask(self, kind: str, fields: Mapping[str, Any], **arrays: NDArray) -> Message:
        """The reply to a request. Raises SimulatorError if there is none, and has begun to replace the worker then;
        UserError if the simulator refuses the request."""
        if self.process.poll() is not None:  # since the last request: whoever starts an episode loses nothing
            self._replace(f"its process ended with {self.process.returncode}")
            if kind != "reset":
                raise SimulatorError(self.fault)
        self.ready()
        return self._exchange({"kind": kind, "name": self.recipe["name"], **fields}, arrays, self.deadline_s, SILENT_S)

    def dismiss(self) -> None:
        """The worker leaves when nobody listens."""
        if self._channel is not None:
            self._channel.close()
        if self._call is not None:
            self._call.close()

    def close(self) -> None:
        self.dismiss()
        try:
            self.process.wait(LEAVE_S if self._facts is not None else 0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _exchange(
        self, fields: Mapping[str, Any], arrays: Mapping[str, NDArray], limit_s: float, silent_s: float
    ) -> Message:
        try:
            reply, received = _converse(self._connected(), fields, arrays, limit_s, silent_s)
        except TimeoutError as error:
            self._replace(str(error))
            raise SimulatorError(self.fault) from error
        except ConnectionError as error:
            try:
                why = f"its process ended with {self.process.wait(1)}"
            except subprocess.TimeoutExpired:  # it may take Ray some time to find that a host is gone
                why = f"its connection ended ({error})"
            self._replace(why)
            raise SimulatorError(self.fault) from error
        if "refused" in reply:
            raise UserError(reply["refused"])
        if "raised" in reply:  # of a whole simulator: what state it is in, nobody knows
            self._replace(reply["raised"])
            raise SimulatorError(self.fault)
        return reply, received

    def _replace(self, why: str) -> None:
        self.fault, self.restarts = why, self.restarts + 1
        _log.warning(
            "simulator %s: a worker of %d rows is replaced: %s", self.recipe["name"], self.recipe["count"], why
        )
        self.process.kill()
        self.process.wait()
        self.dismiss()
        self._start()

    def _connected(self) -> socket.socket:
        """Awaits the call of a worker on another host. Raises UserError if no host has room for it."""
        if self._channel is None:
            assert isinstance(self.process, RayProcess) and self._call is not None
            self.process.room(START_S)
            self._channel = self._call.accept(self.process, START_S)
        return self._channel


class IncomingCall:
    """Where one worker on another host calls, and what it says first. Anybody else who calls is turned away."""

    def __init__(self, host: str) -> None:
        self.token = secrets.token_hex(_TOKEN_BYTES // 2)
        self._listener = socket.create_server((host, 0))
        self.address: tuple[str, int] = self._listener.getsockname()

    def accept(self, process: RayProcess, limit_s: float) -> socket.socket:
        """Raises ConnectionError if the process ends before it calls, TimeoutError if it does not call."""
        end = time.monotonic() + limit_s
        self._listener.settimeout(POLL_S)
        while time.monotonic() < end:
            with suppress(TimeoutError):
                channel, _ = self._listener.accept()
                channel.settimeout(CALL_S)
                with suppress(OSError):
                    if secrets.compare_digest(bytes(_exactly(channel, _TOKEN_BYTES)), self.token.encode()):
                        channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                        return channel
                channel.close()
            if process.poll() is not None:
                raise ConnectionResetError("its process ended")
        raise TimeoutError(f"no call in {limit_s:g} s")

    def close(self) -> None:
        self._listener.close()


def _spread(error: Exception, out: Transition, picked: Sequence[int]) -> None:
    for i in picked:
        out.errors[i] = error


def _merge(reply: Mapping[str, Any], arrays: Mapping[str, NDArray], out: Transition, picked: Sequence[int]) -> None:
    """Raises SimulatorError for a worker whose simulator has other dimensions than the first one's."""
    for name in _ARRAYS:
        place, array = vars(out)[name], arrays[name]
        if array.shape != (len(picked), *place.shape[1:]):
            raise SimulatorError(f"{name} of shape {array.shape}, where another worker has {place.shape[1:]} a row")
        place[picked] = array
    for i, text in zip(picked, reply["errors"], strict=True):
        out.errors[i] = None if text is None else SimulatorError(text)


# Messages


def _send(channel: socket.socket, fields: Mapping[str, Any], arrays: Mapping[str, NDArray]) -> None:
    packed = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    header = {"fields": fields, "arrays": [[name, a.dtype.str, a.shape] for name, a in packed.items()]}
    data = json.dumps(header).encode()
    channel.sendall(b"".join([_LENGTH.pack(len(data)), data, *(array.tobytes() for array in packed.values())]))


def _receive(channel: socket.socket) -> Message:
    """The next message. Raises TimeoutError where the channel's timeout passes, ConnectionError at its end."""
    header = json.loads(_exactly(channel, *_LENGTH.unpack(_exactly(channel, _LENGTH.size))))
    arrays = {}
    for name, dtype, shape in header["arrays"]:
        if dtype not in _DTYPES:
            raise ConnectionAbortedError(f"array {name} has dtype {dtype}, which no simulator sends")
        kind = np.dtype(dtype)
        arrays[name] = np.frombuffer(_exactly(channel, int(np.prod(shape)) * kind.itemsize), kind).reshape(shape)
    return header["fields"], arrays


def _exactly(channel: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        got = channel.recv_into(view)
        if not got:
            raise ConnectionResetError("the other side ended")
        view = view[got:]
    return data


def _converse(
    channel: socket.socket, fields: Mapping[str, Any], arrays: Mapping[str, NDArray], limit_s: float, silent_s: float
) -> Message:
    """Sends a request and awaits its reply for `limit_s` seconds, and a sign of life for `silent_s`."""
    end = time.monotonic() + limit_s
    channel.settimeout(min(limit_s, silent_s))
    _send(channel, fields, arrays)
    while (left := end - time.monotonic()) > 0:
        channel.settimeout(min(left, silent_s))
        try:
            reply, received = _receive(channel)
        except TimeoutError as error:
            if left > silent_s:
                raise TimeoutError(f"no sign of life in {silent_s:g} s") from error
            break
        if "alive" not in reply:
            return reply, received
    raise TimeoutError(f"no answer in {limit_s:g} s")


# The worker's side


def serve_here(descriptor: int) -> None:
    serve(socket.socket(fileno=descriptor))


def serve_there(host: str, port: int) -> None:
    threading.Thread(target=end_with_parent, daemon=True).start()
    channel = socket.create_connection((host, port), CALL_S)
    channel.settimeout(None)
    channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    channel.sendall(os.environ.pop(_TOKEN).encode())
    serve(channel)


def serve(connection: socket.socket) -> None:
    """Makes the simulator that the first message describes and answers requests until the other side closes."""
    make = load_attribute("mmrl.sims.registry:make")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what simulators print is no result of a program's
    made: list[Simulator] = []

    def begin() -> Message:
        made.append(make(recipe["name"], recipe["count"], recipe["options"]))
        return {name: getattr(made[0], name) for name in _FACTS} | {"cameras": cameras_of(made[0])}, {}

    with connection as channel, suppress(ConnectionError):
        lock, busy = threading.Lock(), threading.Event()
        threading.Thread(target=_beat, args=(channel, lock, busy), daemon=True).start()

        def answer(respond: Callable[[], Message]) -> bool:
            """Whether the simulator can go on."""
            busy.set()
            try:
                fields, arrays = respond()
            except UserError as error:
                fields, arrays = {"refused": str(error)}, {}
            except Exception as error:
                fields, arrays = {"raised": told(error)}, {}
            busy.clear()
            with lock:
                _send(channel, fields, arrays)
            return bool(made) and "raised" not in fields

        recipe, _ = _receive(channel)
        going, fitted = answer(begin), set[str]()
        while going:
            request = _receive(channel)
            going = answer(partial(_respond, made[0], fitted, *request))
    for simulator in made:
        simulator.close()


def _respond(
    simulator: Simulator, fitted: set[str], fields: Mapping[str, Any], arrays: Mapping[str, NDArray]
) -> Message:
    """fitted: what has given what it should, as in `VectorSim`; arrays that do not fit could not be told from others on
    the way."""
    kind, rows = fields["kind"], fields["rows"]
    if kind == "expert":
        wanted = (len(rows), fields["length"], simulator.action_dim)
        return {}, {"actions": checked_actions(fields["name"], simulator.expert(rows, fields["length"]), wanted)}
    if kind == "reset":
        moved, length = simulator.reset(rows, fields["seeds"], fields["tasks"]), None
    else:
        moved, length = simulator.step(rows, arrays["actions"]), arrays["actions"].shape[1]
    if wrong := misfit(moved, len(rows), length, simulator):
        raise (SimulatorFault if kind in fitted else UserError)(f"simulator {fields['name']!r}: {kind} {wrong}")
    fitted.add(kind)
    extra = {}
    if kind == "reset":
        begun = zip(rows, moved.errors, strict=True)
        extra = {"instructions": [simulator.instruction(row) if error is None else "" for row, error in begun]}
    errors = [None if error is None else told(error) for error in moved.errors]
    return {"errors": errors, **extra}, {name: _plain(vars(moved)[name]) for name in _ARRAYS}


def _plain(array: NDArray) -> NDArray:
    """In one of _DTYPES: other integers and floats are as good, but nobody expects them."""
    return array if array.dtype.kind in "b" or array.dtype == np.uint8 else array.astype(np.float32)


def _beat(channel: socket.socket, lock: threading.Lock, busy: threading.Event) -> None:
    """Sends signs of life while there is work; ends the process where nobody is left to receive them."""
    while True:
        busy.wait()
        time.sleep(BEAT_S)
        try:
            with lock:
                if busy.is_set():
                    _send(channel, {"alive": True}, {})
        except OSError:
            os._exit(1)

"""A child process that runs a service and answers requests one by one, with deadlines and a check that it runs."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmrl.children.channel import Channel, Patience
from mmrl.children.frames import decode_mapping
from mmrl.children.listener import KEY, Listener, Pair
from mmrl.children.processes import LocalProcess, module_path
from mmrl.children.ray import Cluster, RayProcess
from mmrl.errors import UserError
from mmrl.runtime import devices

Started = tuple[LocalProcess | RayProcess, Pair | Listener]  # a process, and the endpoint that it connects to
Launch = Callable[[str], Started]  # starts a process for a service "package.module:Class"
_MAIN = "mmrl.children.main"


class Lost(ConnectionError):
    """Raised when a child process or its connection ended. code: the return code of the process; None: it still
    runs."""

    def __init__(self, reason: str, code: int | None = None) -> None:
        super().__init__(reason)
        self.code = code


class Refused(UserError):
    """Raised when the service of a child raised UserError for a request; holds its message."""


class Raised(RuntimeError):
    """Raised when the service of a child raised another exception; holds its text. The service's state is then
    undefined."""


@dataclass(frozen=True)
class OnThisHost:
    """Starts a service on this host. python: the interpreter, None for this one. environment: variables that differ
    from this process's. log: file to which the output is appended; None: this process's standard error."""

    python: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    log: Path | None = None

    def __call__(self, service: str) -> Started:
        """Starts the process. Returns it, and the pair of sockets whose other end it has."""
        pair = Pair()
        environment = devices.without_launcher(dict(os.environ)) | module_path(self.python) | dict(self.environment)
        with pair.theirs as theirs:
            command = [self.python or sys.executable, "-m", _MAIN, service, str(theirs.fileno())]
            return LocalProcess(command, environment, log=self.log, descriptors=[theirs.fileno()]), pair


@dataclass(frozen=True)
class OnCluster:
    """Starts a service on a host that Ray chooses, with `gpus` GPUs; see `OnThisHost`."""

    cluster: Cluster
    gpus: int = 0
    python: str | None = None
    log: Path | None = None

    def __call__(self, service: str) -> Started:
        """Requests resources and starts the process on them. Returns it, and the listener that it connects to."""
        listener, process = Listener(self.cluster.host), self.cluster.allocate(gpus=self.gpus, log=self.log)
        host, port = listener.address
        # -E: another interpreter must not use PYTHONPATH, which has the packages of Ray's interpreter.
        flags = [] if self.python in (None, sys.executable) else ["-E"]
        process.run([*flags, "-m", _MAIN, service, host, str(port)], {KEY: listener.key}, self.python)
        return process, listener


class Child:
    """A child process that runs a service. `start` returns at once, and the first `ask` waits until the process has
    connected. The caller decides whether a child that failed is started again.

    starts: how often it was started. up: whether it was started and has not been stopped since.
    """

    process: LocalProcess | RayProcess
    up = False

    def __init__(self, service: str, launch: Launch, records: Collection[type] | None = None) -> None:
        """service: "package.module:Class" of a `mmrl.children.main.Service`. records: dataclasses that answers may
        hold; None: any, see `frames.decode`."""
        self.service, self.launch, self.records, self.starts = service, launch, records, 0
        self._endpoint: Pair | Listener | None = None
        self._channel: Channel | None = None

    def start(self) -> None:
        self.process, self._endpoint = self.launch(self.service)
        self.starts, self.up = self.starts + 1, True

    def ask(self, message: bytes, limit_s: float, *, silent_s: float = math.inf, shared: Sequence[Any] = ()) -> Any:
        """Sends an encoded message and returns the decoded answer.

        limit_s: maximum seconds until the answer, and until a new process has connected. silent_s: maximum seconds
        without a sign of life. shared: see `mmrl.children.frames`. Raises Refused, Raised, Lost, TimeoutError, which
        says what took too long, and UserError if no host of the cluster has free resources.
        """
        try:
            answer = self._connected(limit_s).ask(message, Patience(limit_s, silent_s, self._check_running))
            reply = decode_mapping(answer, shared, self.records)
        except (ConnectionError, ValueError) as error:
            raise self._lost(error) from error
        if "refused" in reply:
            raise Refused(reply["refused"])
        if "raised" in reply:
            raise Raised(reply["raised"])
        return reply["answer"]

    def hang_up(self) -> None:
        """Closes the connection; the child then ends by itself."""
        if self._channel is not None:
            self._channel.close()
        if self._endpoint is not None:
            self._endpoint.close()
        self._endpoint = self._channel = None

    def stop(self, leave_s: float = 0.0) -> None:
        """Closes the connection, waits `leave_s` seconds for the process to end by itself, and then kills it with all
        processes that it has started."""
        self.hang_up()
        if self.up:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(leave_s)
            self.process.kill()
        self.up = False

    def _connected(self, limit_s: float) -> Channel:
        """Returns the channel to the process; waits for its connection at the first call."""
        assert self._endpoint is not None
        if self._channel is None:
            if isinstance(self.process, RayProcess):
                self.process.await_resources(limit_s)
            self._channel = self._endpoint.accept(self._check_running, limit_s)
        return self._channel

    def _check_running(self) -> None:
        """Raises ConnectionResetError if the process has ended."""
        if self.process.poll() is not None:
            raise ConnectionResetError("its process ended")

    def _lost(self, error: Exception) -> Lost:
        """Returns the error of a lost process, with its return code if it has ended."""
        try:
            code = self.process.wait(1)
        except subprocess.TimeoutExpired:  # Ray may need some time to notice that a host is lost
            return Lost(f"its connection ended ({error})")
        return Lost(f"its process ended with {code}", code)

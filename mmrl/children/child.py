"""A process that answers what it is asked, one thing after the other, and is watched while it does."""

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

Started = tuple[LocalProcess | RayProcess, Pair | Listener]  # a process, and where it calls in
Launch = Callable[[str], Started]  # of a service, by its name
_MAIN = "mmrl.children.main"


class Lost(ConnectionError):
    """A child ended, or its connection did. code: what its process returned; None where it did not."""

    def __init__(self, why: str, code: int | None = None) -> None:
        super().__init__(why)
        self.code = code


class Refused(UserError):
    """The service of a child will not do what it was asked."""


class Raised(RuntimeError):
    """The service of a child raised something, here in words. What state it is in, nobody knows."""


@dataclass(frozen=True)
class OnThisHost:
    """On this host. python: the interpreter, None for this one. environment: what differs from ours. log: the file to
    which what it writes is added; None: our standard error."""

    python: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    log: Path | None = None

    def __call__(self, service: str) -> Started:
        pair = Pair()
        environment = devices.without_launcher(dict(os.environ)) | module_path(self.python) | dict(self.environment)
        with pair.theirs as theirs:
            command = [self.python or sys.executable, "-m", _MAIN, service, str(theirs.fileno())]
            return LocalProcess(command, environment, log=self.log, descriptors=[theirs.fileno()]), pair


@dataclass(frozen=True)
class OnCluster:
    """On a host that Ray chooses; see `OnThisHost`."""

    cluster: Cluster
    gpus: int = 0
    python: str | None = None
    log: Path | None = None

    def __call__(self, service: str) -> Started:
        door, placed = Listener(self.cluster.host), self.cluster.place(gpus=self.gpus, log=self.log)
        host, port = door.address
        flags = [] if self.python in (None, sys.executable) else ["-E"]  # it must not see the packages of Ray's
        placed.run([*flags, "-m", _MAIN, service, host, str(port)], {KEY: door.key}, self.python)
        return placed, door


class Child:
    """One process and what it serves. It is started at once and awaited when it is first asked something; whoever asks
    decides what becomes of one that fails.

    starts: how often it was started. up: whether it was, and not stopped since.
    """

    process: LocalProcess | RayProcess
    up = False

    def __init__(self, service: str, launch: Launch, records: Collection[type] | None = None) -> None:
        """service: "package.module:Class" of a `mmrl.children.main.Service`. records: as `decode` has them."""
        self.service, self.launch, self.records, self.starts = service, launch, records, 0
        self._door: Pair | Listener | None = None
        self._channel: Channel | None = None

    def start(self) -> None:
        self.process, self._door = self.launch(self.service)
        self.starts, self.up = self.starts + 1, True

    def ask(self, message: bytes, limit_s: float, *, silent_s: float = math.inf, shared: Sequence[Any] = ()) -> Any:
        """Returns what it answers.

        limit_s: seconds for the answer, and for its process to come up. silent_s: seconds without a sign of life.
        Raises Refused, Raised, Lost, TimeoutError, which says what took too long, and UserError where no host has room.
        """
        try:
            answer = self._connected(limit_s).ask(message, Patience(limit_s, silent_s, self._look))
            found = decode_mapping(answer, shared, self.records)
        except (ConnectionError, ValueError) as error:
            raise self._lost(error) from error
        if "refused" in found:
            raise Refused(found["refused"])
        if "raised" in found:
            raise Raised(found["raised"])
        return found["answer"]

    def hang_up(self) -> None:
        """It leaves when nobody listens."""
        if self._channel is not None:
            self._channel.close()
        if self._door is not None:
            self._door.close()
        self._door = self._channel = None

    def stop(self, leave_s: float = 0.0) -> None:
        """Ends it with all that it started, after so many seconds in which it may leave."""
        self.hang_up()
        if self.up:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(leave_s)
            self.process.kill()
        self.up = False

    def _connected(self, limit_s: float) -> Channel:
        assert self._door is not None
        if self._channel is None:
            if isinstance(self.process, RayProcess):
                self.process.room(limit_s)
            self._channel = self._door.accept(self._look, limit_s)
        return self._channel

    def _look(self) -> None:
        if self.process.poll() is not None:
            raise ConnectionResetError("its process ended")

    def _lost(self, error: Exception) -> Lost:
        try:
            code = self.process.wait(1)
        except subprocess.TimeoutExpired:  # it may take Ray some time to find that a host is gone
            return Lost(f"its connection ended ({error})")
        return Lost(f"its process ended with {code}", code)

"""A worker as the training process sees it: a process that is started, asked and ended, here or on a host of a Ray
cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

from mmrl.runtime import devices
from mmrl.runtime.ray import Cluster, RayProcess
from mmrl.workers.rendezvous import KEY, Door

LOOK = 0.5  # seconds between two looks at whether a process is still there
TAIL = 1 << 14  # bytes of a log


class Lost(ConnectionError):
    """A worker ended, or did not answer in time."""


class Launch(Protocol):
    """How a process is started."""

    def __call__(
        self, arguments: list[str], environment: dict[str, str], log: Path
    ) -> subprocess.Popen[bytes] | RayProcess: ...


@dataclass(frozen=True)
class Here:
    """On this host. device: the GPU that it gets, as torch counts in this process; None where there is none."""

    device: int | None

    def __call__(self, arguments: list[str], environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
        whole = devices.without_launcher(dict(os.environ)) | environment
        whole["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        if self.device is not None:
            whole[devices.VISIBLE] = devices.names([self.device])
        with log.open("ab") as file:
            return subprocess.Popen(
                [sys.executable, *arguments],
                env=whole,
                stdin=subprocess.PIPE,  # it ends when this is closed
                stdout=file,
                stderr=file,
                start_new_session=True,  # Ctrl-C is for the trainer, which then ends the workers
            )


@dataclass(frozen=True)
class OnCluster:
    """On a host that Ray chooses. patience: seconds to wait for room."""

    cluster: Cluster
    gpus: int
    patience: float

    def __call__(self, arguments: list[str], environment: dict[str, str], log: Path) -> RayProcess:
        """Raises UserError if there is no room, ConnectionError if the host is lost."""
        placed = self.cluster.place(gpus=self.gpus, log=log)
        placed.room(self.patience)
        placed.run(arguments, environment)
        return placed


class Handle:
    """One worker. number: of the worker. weights: the number of those that it has, 0 before it has any."""

    def __init__(self, number: int, log: Path, launch: Launch) -> None:
        self.number, self.log, self.launch = number, log, launch
        self.weights = 0
        self.starts = 0
        self._running: subprocess.Popen[bytes] | RayProcess | None = None
        self._link: Connection | None = None

    @property
    def up(self) -> bool:
        return self._link is not None

    def start(self, door: Door, seconds: float) -> None:
        """Raises Lost if it does not report within so many seconds, UserError if there is no room for it."""
        self.starts += 1
        name = f"{self.number}-{self.starts}"  # so that nothing that was started before can answer for it
        self.log.parent.mkdir(parents=True, exist_ok=True)
        host, port = door.address
        try:
            self._running = self.launch(["-m", "mmrl.workers.worker", host, str(port), name], {KEY: door.key}, self.log)
        except ConnectionError as error:
            raise Lost(str(error)) from None
        end = time.monotonic() + seconds
        while (link := door.fetch(name, LOOK)) is None:
            self._look(end, seconds)
        self._link = link

    def ask(self, message: bytes, seconds: float) -> bytes:
        """Its answer. Raises Lost if it ends, or does not answer within so many seconds."""
        assert self._link is not None
        end = time.monotonic() + seconds
        try:
            self._link.send_bytes(message)
            while not self._link.poll(LOOK):
                self._look(end, seconds)
            return self._link.recv_bytes()
        except (EOFError, OSError) as error:
            if isinstance(error, Lost):
                raise
            raise Lost(f"it ended{self._last_words()}") from None

    def stop(self) -> None:
        """Ends it with all that it started."""
        if self._link is not None:
            self._link.close()
        if isinstance(self._running, RayProcess):
            self._running.kill()
        elif self._running is not None:
            with suppress(ProcessLookupError):  # all have ended
                os.killpg(self._running.pid, signal.SIGKILL)
            self._running.wait()
        self._link = self._running = None
        self.weights = 0

    def _look(self, end: float, seconds: float) -> None:
        assert self._running is not None
        if (code := self._running.poll()) is not None:
            raise Lost(f"it ended with {code}{self._last_words()}")
        if time.monotonic() > end:
            raise Lost(f"it did not answer within rollout.workers.timeout={seconds:g} s")

    def _last_words(self) -> str:
        """The last line of its log, which that of another host is only after Ray has told of its end."""
        if not self.log.exists():
            return ""
        with self.log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
            lines = file.read().decode(errors="replace").split("\n")
        said = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"; {self.log} says: {said[:300]}" if said else f", see {self.log}"

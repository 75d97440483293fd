"""Processes of this host that lead a group of their own, and end with the one that started them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext, suppress
from pathlib import Path


class LocalProcess:
    """A running command. Its standard input is a pipe that is never written to, see `end_with_parent`."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        log: Path | None = None,
        descriptors: Sequence[int] = (),
        stdin: int = subprocess.PIPE,
    ) -> None:
        """log: file to which the output is appended; None: this process's standard error. descriptors: file descriptors
        that it inherits."""
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
        with nullcontext(2) if log is None else log.open("ab") as file:
            self.running = subprocess.Popen(
                list(command),
                env=dict(environment),
                stdin=stdin,
                stdout=file,
                stderr=file,
                pass_fds=descriptors,
                start_new_session=True,  # Ctrl-C is for the trainer, which then ends its children
            )

    @property
    def pid(self) -> int:
        return self.running.pid

    def poll(self) -> int | None:
        return self.running.poll()

    def wait(self, timeout: float | None = None) -> int:
        return self.running.wait(timeout)

    def kill(self) -> None:
        """Kills the process with all that it started."""
        end_group(self.pid)
        self.running.wait()
        if self.running.stdin is not None:
            self.running.stdin.close()


def end_group(leader: int) -> None:
    """Kills all processes of a group, at once and so that none can fork away."""
    with suppress(ProcessLookupError, PermissionError):  # all have ended
        os.killpg(leader, signal.SIGKILL)


def end_with_parent() -> None:
    """Kills this process's group when the parent ends; to be run in a thread. The parent holds the other end of
    standard input and never writes, so that it closes however the parent ends."""
    sys.stdin.read()
    os.killpg(0, signal.SIGKILL)


def module_path(python: str | None) -> dict[str, str]:
    """Returns PYTHONPATH for `python`: this process's module path for the same interpreter, none for another one, which
    must not see this one's packages."""
    same = python in (None, sys.executable)
    return {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)) if same else ""}


def free_port(host: str) -> int:
    with closing(socket.create_server((host, 0))) as probe:
        return probe.getsockname()[1]


def tail(log: Path, max_bytes: int) -> str:
    """Returns the last bytes of a file as text."""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - max_bytes))
        return file.read().decode(errors="replace")

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
    """A command that runs. Its standard input is a pipe that is never written to, see `end_with_parent`."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        log: Path | None = None,
        descriptors: Sequence[int] = (),
        stdin: int = subprocess.PIPE,
    ) -> None:
        """log: what it writes is added to this file; None: to our standard error. descriptors: files that it shares."""
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
        """Ends it with all that it started."""
        end_group(self.pid)
        self.running.wait()
        if self.running.stdin is not None:
            self.running.stdin.close()


def end_group(leader: int) -> None:
    """Kills all processes of a group, at once and so that none can fork away."""
    with suppress(ProcessLookupError, PermissionError):  # all have ended
        os.killpg(leader, signal.SIGKILL)


def end_with_parent() -> None:
    """For a thread. The parent holds the other end of our standard input and never writes; it closes however the parent
    ends, and we do then, with all that we started."""
    sys.stdin.read()
    os.killpg(0, signal.SIGKILL)


def module_path(python: str | None) -> dict[str, str]:
    """The environment by which `python` finds modules: the same interpreter those of this process; another one must not
    see this one's packages."""
    own = python in (None, sys.executable)
    return {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)) if own else ""}


def free_port(host: str) -> int:
    with closing(socket.create_server((host, 0))) as probe:
        return probe.getsockname()[1]


def tail(log: Path, most: int) -> str:
    """The last bytes of a file as text."""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - most))
        return file.read().decode(errors="replace")

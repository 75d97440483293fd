"""Local child processes, each in a process group of its own, which end with the process that started them."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext, suppress
from pathlib import Path
from types import FrameType

PARENT = "MMRL_PARENT"  # environment variable: id of the process that ran this one by `run_command`
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
HANDED_ON = (signal.SIGTERM, signal.SIGUSR1)  # signals that `run_command` forwards


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
        """Kills the process with all processes that it started."""
        end_group(self.pid)
        self.running.wait()
        if self.running.stdin is not None:
            self.running.stdin.close()


def run_command(command: Sequence[str]) -> int:
    """Runs a command of mmrl to its end and returns its return code. The command stays in this process's group, so that
    Ctrl-C reaches it; the signals HANDED_ON are forwarded to it; it ends with this process (`end_with_starter`)."""
    running = subprocess.Popen(list(command), env=os.environ | {PARENT: str(os.getpid())})

    def hand_on(signum: int, frame: FrameType | None) -> None:
        running.send_signal(signum)

    before = {number: signal.signal(number, hand_on) for number in HANDED_ON}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, lambda signum, frame: None)  # the terminal sends it to both
    try:
        return running.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def stopped_by(code: int) -> int:
    """Returns the signal that stopped a process with return code `code`: SIGTERM, SIGUSR1 or SIGINT, also if the
    process caught it and exited with 128 + its number. Returns 0 for other return codes."""
    signum = -code if code < 0 else code - 128
    return signum if signum in (*HANDED_ON, signal.SIGINT) else 0


def end_with_forker() -> None:
    """Has the kernel kill this process when the thread that forked it ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def end_with_starter() -> None:
    """Has the kernel kill this process when the process that started it by `run_command` ends, also if that crashes.
    Does nothing in a process that was started in another way."""
    parent = os.environ.pop(PARENT, None)
    if parent is not None:
        end_with_forker()
        if os.getppid() != int(parent):  # the starter ended before the kernel was asked
            os._exit(1)


def leave_signals_to_parent() -> None:
    """Ignores the signals HANDED_ON, which a scheduler sends to every process of a job: the trainer saves a checkpoint
    and then ends its children. Commands that this process starts do not ignore them."""
    for number in HANDED_ON:
        signal.signal(number, lambda signum, frame: None)  # SIG_IGN would be inherited by those commands


def end_group(leader: int) -> None:
    """Kills all processes of a process group at once."""
    with suppress(ProcessLookupError, PermissionError):  # all have ended
        os.killpg(leader, signal.SIGKILL)


def end_with_parent() -> None:
    """Kills this process's group when the parent ends; to be run in a thread. The parent holds the other end of
    standard input and never writes, so that it is closed when the parent ends, also if it crashes."""
    sys.stdin.read()
    os.killpg(0, signal.SIGKILL)


def module_path(python: str | None) -> dict[str, str]:
    """Returns PYTHONPATH for `python`: this process's module path for the same interpreter, empty for another
    interpreter, which must not import this one's packages."""
    is_same = python in (None, sys.executable)
    return {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)) if is_same else ""}


def free_port(host: str) -> int:
    """Returns a port of this host's address `host` on which no process listens."""
    with closing(socket.create_server((host, 0))) as probe:
        return probe.getsockname()[1]


def tail(log: Path, max_bytes: int) -> str:
    """Returns the last bytes of a file as text."""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - max_bytes))
        return file.read().decode(errors="replace")

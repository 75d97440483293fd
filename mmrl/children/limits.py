"""Resource limits and environment of a process with untrusted code, and ending all processes that it has started.

This needs Linux. On other systems a worker has no limits but its deadline, and children that it moved to another
process group are not ended.
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from mmrl.settings import Section, option

LINUX = sys.platform == "linux"
GIBIBYTE = 1 << 30
END_S = 5.0  # seconds for killed processes to end
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_SECRET = re.compile("TOKEN|KEY|SECRET|PASSW|CREDENTIAL|COOKIE|AUTH", re.IGNORECASE)
_ADDRESS_WITH_PASSWORD = re.compile(r"://[^/\s@:]*+:[^/\s@]*+@")


class Limits(Section):
    """Limits of each worker process of an isolated reward."""

    memory_gib: float = option(
        4.0,
        "address space that a worker, and each process that it starts, may take beyond what it has when its reward is "
        "built (RLIMIT_AS)",
        unit="GiB",
        gt=0,
    )
    processes: int = option(
        64,
        "processes and threads that a worker may have started at a time; one that has more is ended, with all of them. "
        "For an ordinary user the kernel refuses them in addition (RLIMIT_NPROC)",
        ge=0,
    )
    cpu_s: float = option(
        600.0,
        "CPU time that a worker, and each process that it starts, may use (RLIMIT_CPU); a worker that has used half of "
        "it is replaced between two samples",
        unit="s",
        gt=0,
    )

    def apply(self) -> None:
        """Sets the limits of this process and of the processes that it will start, irrevocably."""
        if not LINUX:
            return
        _lower(resource.RLIMIT_AS, _address_space() + int(self.memory_gib * GIBIBYTE))
        _lower(resource.RLIMIT_CPU, max(1, round(_cpu_seconds() + self.cpu_s)))
        _lower(resource.RLIMIT_CORE, 0)
        self._limit_processes()

    def spent(self) -> bool:
        """Returns whether this process has used half of its CPU time."""
        return _cpu_seconds() > self.cpu_s / 2

    def _limit_processes(self) -> None:
        """Sets RLIMIT_NPROC, unless no process could be started under it: the kernel also counts the user's processes
        in other containers, which this one cannot see."""
        before = resource.getrlimit(resource.RLIMIT_NPROC)
        limit = _tasks_of_user() + self.processes + 1  # 1: the trial process below
        if before[1] != resource.RLIM_INFINITY and before[1] <= limit:
            return
        resource.setrlimit(resource.RLIMIT_NPROC, (limit, before[1]))
        try:
            child = os.fork()
        except OSError:
            resource.setrlimit(resource.RLIMIT_NPROC, before)
            return
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        resource.setrlimit(resource.RLIMIT_NPROC, (limit, limit))


def clean_environment() -> dict[str, str]:
    """Returns this process's environment without credentials: without variables whose name suggests a secret, and
    without addresses that contain a password."""
    return {
        name: value
        for name, value in os.environ.items()
        if not _SECRET.search(name) and not _ADDRESS_WITH_PASSWORD.search(value)
    }


def adopt_orphans() -> None:
    """Makes this process the parent of descendants whose own parent ends (a child subreaper), also of those that left
    its process group."""
    if LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_descendants(keep: Collection[int] = ()) -> None:
    """Kills and awaits all descendants of this process except the children `keep` and their descendants. Repeats until
    none is left, since children of a killed process become children of this one (see `adopt_orphans`)."""
    end = time.monotonic() + END_S
    while (pids := _descendants(os.getpid(), keep)) and time.monotonic() < end:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)  # all are stopped first, or they could fork faster than they are killed
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in pids:
            with suppress(ChildProcessError):  # not a child yet; it is adopted and awaited in a later round
                os.waitpid(pid, os.WNOHANG)
        time.sleep(1e-3)


def tasks_below(pid: int) -> int:
    """Returns the number of threads of a process beside its first, and of all its descendants."""
    return _threads(pid) - 1 + sum(map(_threads, _descendants(pid, ())))


def _threads(pid: int) -> int:
    """Returns the number of threads of a process; 0 if it has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
        return len(os.listdir(f"/proc/{pid}/task"))
    return 0


def _descendants(pid: int, keep: Collection[int]) -> list[int]:
    """Returns the ids of all descendants of a process except its children `keep` and their descendants."""
    children = [child for child in _children(pid) if child not in keep]
    return [*children, *(below for child in children for below in _descendants(child, keep))]


def _children(pid: int) -> list[int]:
    """Returns the ids of the children of a process."""
    pids: list[int] = []
    with suppress(FileNotFoundError, ProcessLookupError):  # it has ended, or this is not Linux
        for thread in Path(f"/proc/{pid}/task").iterdir():
            pids += map(int, (thread / "children").read_text().split())
    return pids


def _lower(which: int, limit: int) -> None:
    """Sets soft and hard limit of the resource `which` to `limit`, or to the present hard limit if that is lower."""
    _, hard = resource.getrlimit(which)
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(which, (limit, limit))


def _address_space() -> int:
    """Returns the size of this process's address space in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _cpu_seconds() -> float:
    """Returns the CPU time that this process has used."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _tasks_of_user() -> int:
    """Returns the number of threads of all processes with this user's id."""
    return sum(map(_tasks, Path("/proc").glob("[0-9]*/status")))


def _tasks(status: Path) -> int:
    """Returns the number of threads of a process with this user's id, else 0. status: its file in /proc."""
    with suppress(OSError):  # it has ended
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
        if int(fields["Uid"].split()[0]) == os.getuid():
            return int(fields["Threads"])
    return 0

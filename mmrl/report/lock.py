"""One run at a time in a run directory."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from pathlib import Path
from typing import Any, TextIO

from mmrl.errors import UserError

NAME = "run.lock"


class RunLock:
    """Held by a process from its making until `release`, or until the process ends, however it ends.

    The system keeps it, as a record lock: unlike flock's it is not inherited by workers, which may live a little longer
    than a killed trainer. The file says who holds it, for people, and for file systems that have no locks. Within one
    process it may be taken twice.
    """

    def __init__(self, folder: Path) -> None:
        """Raises UserError if another process holds it, OSError if the folder can not be written."""
        self._file = (folder / NAME).open("a+")
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # POSIX allows either
            owner = named(self._file)
            self._file.close()
            raise in_use(folder, owner) from None
        except OSError:  # no locks on this file system: only what the file says counts
            pass
        owner = named(self._file)
        if owner.get("process") != os.getpid() and lives(owner):
            self._file.close()
            raise in_use(folder, owner)
        self._write(me())

    def release(self) -> None:
        if not self._file.closed:
            self._write({})
            self._file.close()

    def _write(self, owner: dict[str, Any]) -> None:
        self._file.truncate(0)
        self._file.write(json.dumps(owner))
        self._file.flush()


def check_free(folder: Path) -> None:
    """Raises UserError if another process runs in `folder`. Changes nothing."""
    if (folder / NAME).is_file() and os.access(folder / NAME, os.W_OK):
        with (folder / NAME).open("r+") as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                raise in_use(folder, named(file)) from None


def named(file: TextIO) -> dict[str, Any]:
    """Who a lock file says holds it. Empty where nobody is named, or a power loss left no readable name."""
    file.seek(0)
    try:
        owner = json.loads(file.read())
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) else {}


def in_use(folder: Path, owner: dict[str, Any]) -> UserError:
    who = f"process {owner.get('process', 'unknown')} on {owner.get('host', 'an unknown host')}"
    since = owner.get("since", "an unknown time")
    return UserError(f"run_dir={folder} is in use by {who} since {since}; wait for it, end it, or name another run_dir")


def me() -> dict[str, Any]:
    pid = os.getpid()
    since = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    return {"host": socket.gethostname(), "process": pid, "started": started(pid), "since": since}


def lives(owner: dict[str, Any]) -> bool:
    """Whether that process is there still, as far as this host can tell. A number is given to another process in time,
    so the moment of its start has to be the same."""
    here = owner.get("host") == socket.gethostname()
    return here and owner.get("started") is not None and started(owner["process"]) == owner["started"]


def started(pid: int) -> int | None:
    """When a process started, in ticks since the host did; None where there is none, or only its exit code."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])

"""Locks a run directory, so that it holds one run at a time."""

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
POLL_S = 0.5  # between two looks whether a run directory is free


class RunLock:
    """A lock that a process holds from construction until `release`, or until the process ends in any way.

    It is a POSIX record lock: unlike flock's it is not inherited by workers, which may outlive a killed trainer. The
    file names its owner, for people and for file systems without locks. One process may take it twice.
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
        except OSError:  # no locks on this file system: the owner in the file decides
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
    if (owner := owner_of(folder)) is not None:
        raise in_use(folder, owner)


def owner_of(folder: Path) -> dict[str, Any] | None:
    """Returns the other process that runs in `folder`, as its lock names it; None without one. Changes nothing."""
    if (folder / NAME).is_file() and os.access(folder / NAME, os.W_OK):
        with (folder / NAME).open("r+") as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                return named(file)
            except OSError:  # no locks on this file system: the owner in the file decides
                owner = named(file)
                return owner if owner.get("process") != os.getpid() and lives(owner) else None
    return None


def await_free(folder: Path, why: str) -> bool:
    """Waits while another process runs in `folder`, and says so in one line that ends with `why`. Returns whether it
    had to wait."""
    if (owner := owner_of(folder)) is None:
        return False
    print(f"waiting for {described(owner)}, which runs in {folder}: {why}", flush=True)
    while owner_of(folder) is not None:
        time.sleep(POLL_S)
    return True


def named(file: TextIO) -> dict[str, Any]:
    """Returns the owner that a lock file names; empty where it names none or is damaged."""
    file.seek(0)
    try:
        owner = json.loads(file.read())
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) else {}


def in_use(folder: Path, owner: dict[str, Any]) -> UserError:
    since = owner.get("since", "an unknown time")
    return UserError(
        f"run_dir={folder} is in use by {described(owner)} since {since}; wait for it, end it, or name another run_dir"
    )


def described(owner: dict[str, Any]) -> str:
    return f"process {owner.get('process', 'unknown')} on {owner.get('host', 'an unknown host')}"


def me() -> dict[str, Any]:
    pid = os.getpid()
    since = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    return {"host": socket.gethostname(), "process": pid, "started": started(pid), "since": since}


def lives(owner: dict[str, Any]) -> bool:
    """Returns whether the owner is a process of this host that still runs. Process ids are reused, so the start time
    has to match too."""
    on_this_host = owner.get("host") == socket.gethostname()
    return on_this_host and owner.get("started") is not None and started(owner["process"]) == owner["started"]


def started(pid: int) -> int | None:
    """Returns the start time of a process in ticks since boot; None where it does not exist or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])

"""Locks a run directory, so that only one process at a time trains in it.

The owner of a lock is a mapping with the keys host, process (its id), started (ticks since boot) and since (a date).
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from pathlib import Path
from typing import Any, TextIO

from mmrl.errors import UserError

LOCK_FILE = "run.lock"
POLL_S = 0.5  # seconds between two checks whether a run directory is free


class RunLock:
    """A lock that a process holds from construction until `release`, or until the process ends in any way.

    It is a POSIX record lock: unlike flock's it is not inherited by workers, which may outlive a killed trainer. The
    file names its owner, for people and for file systems without locks. One process may take it twice.
    """

    def __init__(self, folder: Path) -> None:
        """Takes the lock. Raises UserError if another process holds it, OSError if the folder cannot be written."""
        self._file = (folder / LOCK_FILE).open("a+")
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # POSIX allows either error
            owner = read_owner(self._file)
            self._file.close()
            raise in_use_error(folder, owner) from None
        except OSError:  # no locks on this file system: the owner in the file decides
            pass
        owner = read_owner(self._file)
        if owner.get("process") != os.getpid() and is_alive(owner):
            self._file.close()
            raise in_use_error(folder, owner)
        self._write(this_process())

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
        raise in_use_error(folder, owner)


def owner_of(folder: Path) -> dict[str, Any] | None:
    """Returns the other process that runs in `folder`; None if there is none. Changes nothing."""
    if (folder / LOCK_FILE).is_file() and os.access(folder / LOCK_FILE, os.W_OK):
        with (folder / LOCK_FILE).open("r+") as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                return read_owner(file)
            except OSError:  # no locks on this file system: the owner in the file decides
                owner = read_owner(file)
                return owner if owner.get("process") != os.getpid() and is_alive(owner) else None
    return None


def await_free(folder: Path, reason: str) -> bool:
    """Waits until no other process runs in `folder`. Returns whether it had to wait.

    reason: the end of the line that is printed while waiting.
    """
    if (owner := owner_of(folder)) is None:
        return False
    print(f"waiting for {owner_text(owner)}, which runs in {folder}: {reason}", flush=True)
    while owner_of(folder) is not None:
        time.sleep(POLL_S)
    return True


def read_owner(file: TextIO) -> dict[str, Any]:
    """Returns the owner in a lock file; {} if there is none or the file is damaged."""
    file.seek(0)
    try:
        owner = json.loads(file.read())
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) else {}


def in_use_error(folder: Path, owner: dict[str, Any]) -> UserError:
    """Returns the error for a run directory that `owner` uses."""
    time_text = owner.get("since", "an unknown time")
    return UserError(
        f"run_dir={folder} is in use by {owner_text(owner)} since {time_text}; wait for it, end it, or name another "
        "run_dir"
    )


def owner_text(owner: dict[str, Any]) -> str:
    return f"process {owner.get('process', 'unknown')} on {owner.get('host', 'an unknown host')}"


def this_process() -> dict[str, Any]:
    """Returns this process as the owner of a lock."""
    pid = os.getpid()
    time_text = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    return {"host": socket.gethostname(), "process": pid, "started": start_ticks(pid), "since": time_text}


def is_alive(owner: dict[str, Any]) -> bool:
    """Returns whether the owner is a process of this host that still runs. Its start time must match too, since
    process ids are reused."""
    on_this_host = owner.get("host") == socket.gethostname()
    return on_this_host and owner.get("started") is not None and start_ticks(owner["process"]) == owner["started"]


def start_ticks(pid: int) -> int | None:
    """Returns the start time of a process in ticks since boot; None where it does not exist or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    # after the name in brackets: the state (Z: zombie, X: dead) comes first, the start time 20th
    return None if fields[0] in "ZX" else int(fields[19])

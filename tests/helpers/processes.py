"""What tests look at of processes that are not their own children."""

import os
import time
from contextlib import suppress
from pathlib import Path

SOON = 20.0  # seconds


def environment(pid):
    return Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")


def running(pid):
    try:
        os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (ProcessLookupError, FileNotFoundError):  # it may end between the two looks at it
        return False
    return "Z" not in stat.rsplit(")", 1)[1].split()[0]


def family(*pids):
    """Processes and their children."""
    words = [Path(f"/proc/{pid}/task/{pid}/children").read_text().split() for pid in pids]
    return [*pids, *(int(word) for found in words for word in found)]


def gone(pids):
    end = time.monotonic() + SOON
    while any(running(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(running(pid) for pid in pids)


def group(leader):
    """The processes of a group."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(ProcessLookupError):
            if os.getpgid(int(path.name)) == leader:
                found.append(int(path.name))
    return found

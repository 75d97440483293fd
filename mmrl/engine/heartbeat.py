"""Ranks that watch each other, so that a wait has an end and names who is missing."""

from __future__ import annotations

import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

FOLDER = "ranks"  # in the run directory: a file of each rank says that it lives, and where it is
SHARE_WARNED = 0.1  # of the limit, after which a wait is announced
START_S = 600.0  # that ranks may come up after one another, where engine.timeout is not shorter
COMES_UP_S = 0.1  # that a process takes at least from its beginning to its first file
GONE_S = 1.0  # seconds that a process takes at most from its last connection to its end
BEATS_MISSED = 4  # after so many a rank is taken for silent


def process_namespace() -> str:
    """Returns a name of what process numbers count in: containers of one host name may have numbers of their own.
    Empty where the system does not tell, so that the host's name alone decides."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


@dataclass
class RankState:
    """The state of a rank, in its file. marks: how many phases and collectives it has begun; all ranks begin the
    same."""

    rank: int
    host: str
    process: int
    phase: str = "start"
    marks: int = 0
    beats: int = 0
    written: float = 0.0  # when this was, in seconds since 1970 by the clock of the host
    namespace: str = field(default_factory=process_namespace)

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.process} on {self.host}, in phase {self.phase})"


class Heartbeat:
    """Writes the state of this rank, and reads those of the others. Where this rank has waited `limit` seconds for one
    that has not moved, it ends this process with one line. A thread does this, also while a collective waits.

    It begins before ranks meet. Until they have, it ends this process also for a rank of this host that is gone, and in
    the block of `meeting` for one that has not come up after `START_S` seconds.
    """

    def __init__(self, folder: Path, rank: int, world: int, limit: float) -> None:
        self.folder, self.world, self.limit = folder / FOLDER, world, limit
        self.state = RankState(rank, socket.gethostname(), os.getpid())
        self.start = min(START_S, limit)
        self._began = process_start()
        self.interval = min(15.0, max(0.2, limit / 100))
        # by rank, with the times of the last beat and of the last mark
        self._states: dict[int, tuple[RankState, float, float]] = {}
        self._warned = False
        self._meets_since = math.inf  # the time at which this rank began to wait until all have come up
        self._met = False
        self._ended = threading.Event()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._beat()
        self._read()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def mark(self, phase: str | None = None) -> None:
        """Notes that a collective begins, or a phase."""
        self.state.marks += 1
        self.state.phase = phase or self.state.phase

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """Context in which this rank waits until all have come up."""
        self._meets_since = time.monotonic()
        yield
        self._met = True
        self.mark()

    def close(self) -> None:
        """Ends the thread, and removes this rank's file. Does nothing the second time."""
        self._ended.set()
        self._thread.join()
        with suppress(OSError):  # the other ranks' files may be there still
            self._path(self.state.rank).unlink(missing_ok=True)
            self.folder.rmdir()

    def dead(self) -> RankState | None:
        """Returns a rank of this host whose process is gone, or None. Waits for one that is about to be: its
        connections are closed before it is gone."""
        end = time.monotonic() + GONE_S
        while True:
            self._read()  # in a run that has just begun the thread has not
            gone = self._gone()
            if gone is not None or time.monotonic() > end:
                return gone
            time.sleep(GONE_S / 20)

    def _gone(self) -> RankState | None:
        states = [state for state, _, _ in list(self._states.values())]
        return next((state for state in states if self._is_here(state) and not runs(state.process)), None)

    def _is_here(self, state: RankState) -> bool:
        """Returns whether this process can see whether that of a rank runs."""
        return (state.host, state.namespace) == (self.state.host, self.state.namespace)

    def _run(self) -> None:
        while not self._ended.wait(self.interval if self._met else min(1.0, self.interval)):
            self._beat()
            self._read()
            self._judge(time.monotonic())
            if not self._met:
                self._judge_meeting(time.monotonic())

    def _beat(self) -> None:
        self.state.beats += 1
        self.state.written = time.time()
        path = self._path(self.state.rank)
        pending = path.with_suffix(".pending")
        with suppress(OSError):  # a full disk, or a run directory that is gone, is for others to tell
            pending.write_text(json.dumps(asdict(self.state)))
            pending.replace(path)

    def _read(self) -> None:
        now = time.monotonic()
        for rank in range(self.world):
            with suppress(OSError, ValueError, TypeError):  # not there yet, or not whole
                state = RankState(**json.loads(self._path(rank).read_text()))
                if rank not in self._states and self._of_another_start(state):
                    continue
                before, beat, mark = self._states.get(rank, (None, now, now))
                if before is None or before.process != state.process or before.marks != state.marks:
                    mark = now
                if before is None or before.beats != state.beats:
                    beat = now
                self._states[rank] = (state, beat, mark)

    def _of_another_start(self, state: RankState) -> bool:
        """Returns whether a file is what a rank left that was killed before this process began."""
        if not self._is_here(state) or runs(state.process):
            return False
        return state.written < self._began + COMES_UP_S

    def _judge_meeting(self, now: float) -> None:
        waited, problem = now - self._meets_since, None
        if (gone := self._gone()) is not None:
            problem = f"{gone} has ended before all ranks had come up"
        elif (absent := [rank for rank in range(self.world) if rank not in self._states]) and waited >= self.start:
            listed = ("rank " if len(absent) == 1 else "ranks ") + ", ".join(map(str, absent))
            problem = f"{listed} did not come up within {waited:.0f} s: no file in {self.folder}"
        if problem is not None and not self._met:
            say(f"mmrl: {problem}; the run ends")
            end_at_once(2)

    def _judge(self, now: float) -> None:
        """Warns of a rank that keeps the others waiting, and ends the run with code 2 after engine.timeout seconds.
        now: seconds."""
        if self.state.rank not in self._states:
            return
        waited = now - self._states[self.state.rank][2]
        missing = missing_rank(self._states, self.state.rank, now, BEATS_MISSED * self.interval)
        if missing is None or waited < SHARE_WARNED * self.limit:
            self._warned = False
            return
        state, why, still = missing
        waited = min(waited, still)
        if waited >= self.limit:
            say(f"mmrl: {state} {why} for {waited:.0f} s, longer than engine.timeout={self.limit:g}; the run ends")
            end_at_once(2)
        if waited >= SHARE_WARNED * self.limit and not self._warned:
            self._warned = True
            say(f"waiting for {state}: it {why} for {waited:.0f} s")

    def _path(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.json"


def missing_rank(
    states: dict[int, tuple[RankState, float, float]], me: int, now: float, silent_after: float
) -> tuple[RankState, str, float] | None:
    """Returns the rank that rank `me` waits for, why, and for how many seconds: one without a heartbeat for
    `silent_after` seconds, else one that has begun fewer phases and collectives. None where no rank can be named.
    states: by rank, (state, time of the last heartbeat, time of the last progress), in seconds like `now`."""
    others = [(state, now - beat, now - mark) for rank, (state, beat, mark) in states.items() if rank != me]
    silent = [(state, "has sent no heartbeat", beat) for state, beat, _ in others if beat > silent_after]
    behind = [(state, "has made no progress", mark) for state, _, mark in others if state.marks < states[me][0].marks]
    return max(silent or behind, key=lambda entry: entry[2], default=None)


def runs(process: int) -> bool:
    """Returns whether a process of this host runs; one that has ended and left only its exit code does not."""
    if sys.platform != "linux":
        return psutil.pid_exists(process)
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def process_start() -> float:
    """Returns when this process began, in seconds since 1970."""
    if sys.platform != "linux":
        return psutil.Process().create_time()
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # since the host's start
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")  # psutil errs by up to a second
    return time.time() - age


end_at_once = os._exit  # as it is before a training replaces it, see `Interruption`


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)

"""Heartbeats of ranks: each watches the others, so that a wait for a missing rank ends with an error that names it."""

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

from mmrl.runtime.user_code import end_at_once
from mmrl.runtime.watchdog import release

FOLDER = "ranks"  # in the run directory: holds a file for each rank with its `RankState`
WARNING_SHARE = 0.1  # share of engine.timeout after which a wait is reported
START_S = 600.0  # seconds in which all ranks must start, where engine.timeout is not shorter
MIN_START_S = 0.1  # seconds that a process takes at least from its start to its first file
EXIT_S = 1.0  # seconds that a process takes at most from closing its connections to its end
BEATS_MISSED = 4  # number of missed heartbeats after which a rank counts as silent


def process_namespace() -> str:
    """Returns an id of this process's PID namespace: containers with the same host name may have process ids of their
    own. Returns "" where the system has no such id."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


@dataclass
class RankState:
    """The state of a rank, as its file holds it. marks: number of phases and collectives that it has begun; these are
    the same on all ranks, so that a rank with fewer marks is behind."""

    rank: int
    host: str
    process: int
    phase: str = "start"
    marks: int = 0
    beats: int = 0
    written: float = 0.0  # time at which the file was written, in seconds since 1970 by the host's clock
    namespace: str = field(default_factory=process_namespace)

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.process} on {self.host}, in phase {self.phase})"


class Heartbeat:
    """Writes the state of this rank and reads the states of the others, in a thread. Where this rank has waited `limit`
    seconds for a rank that makes no progress, it prints one line and ends this process, even during a collective.

    It starts before ranks connect. Until they have, it also ends this process for a rank of this host whose process has
    ended, and in the block of `meeting` for a rank that has not started after `START_S` seconds.
    """

    def __init__(self, folder: Path, rank: int, world: int, limit: float) -> None:
        """Begins to write this rank's heartbeat, and to watch the heartbeats of all `world` ranks, in a thread. folder:
        the run directory. limit: engine.timeout in seconds."""
        self.folder, self.world, self.limit = folder / FOLDER, world, limit
        self.state = RankState(rank, socket.gethostname(), os.getpid())
        self.start = min(START_S, limit)  # seconds within which all ranks have to start
        self._began = process_start()
        self.interval = min(15.0, max(0.2, limit / 100))  # seconds between two heartbeats
        # By rank: its state, and the times at which its beats and its marks last changed
        self._states: dict[int, tuple[RankState, float, float]] = {}
        self._warned = False
        self._meeting_began = math.inf  # the time at which this rank began to wait for all ranks to start
        self._met = False  # whether all ranks have connected
        self._ended = threading.Event()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._beat()
        self._read()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def mark(self, phase: str | None = None) -> None:
        """Records that this rank begins a phase, or a collective where `phase` is None."""
        self.state.marks += 1
        self.state.phase = phase or self.state.phase

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """A context in which this rank waits until all ranks have connected."""
        self._meeting_began = time.monotonic()
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
        """Returns a rank of this host whose process has ended, or None. Waits up to EXIT_S seconds, since connections
        of an ending process close before it is gone."""
        end = time.monotonic() + EXIT_S
        while True:
            self._read()  # at the start of a run the thread may not have read yet
            ended = self._ended_rank()
            if ended is not None or time.monotonic() > end:
                return ended
            time.sleep(EXIT_S / 20)

    def _ended_rank(self) -> RankState | None:
        """Returns a rank of this host whose process has ended, or None."""
        states = [state for state, _, _ in list(self._states.values())]
        return next((state for state in states if self._is_visible(state) and not is_running(state.process)), None)

    def _is_visible(self, state: RankState) -> bool:
        """Returns whether a rank's process is in this host and PID namespace, so that it can be looked up."""
        return (state.host, state.namespace) == (self.state.host, self.state.namespace)

    def _run(self) -> None:
        """Writes and reads heartbeats, and checks the other ranks, until `close`; runs in the thread. Before all ranks
        have connected, it does so at least every second."""
        while not self._ended.wait(self.interval if self._met else min(1.0, self.interval)):
            self._beat()
            self._read()
            self._check_progress(time.monotonic())
            if not self._met:
                self._check_meeting(time.monotonic())

    def _beat(self) -> None:
        """Writes the state of this rank to its file."""
        self.state.beats += 1
        self.state.written = time.time()
        path = self._path(self.state.rank)
        pending = path.with_suffix(".pending")
        with suppress(OSError):  # a full disk or a removed run directory is reported elsewhere
            pending.write_text(json.dumps(asdict(self.state)))
            pending.replace(path)

    def _read(self) -> None:
        """Reads the files of all ranks and records when their beats and marks changed."""
        now = time.monotonic()
        for rank in range(self.world):
            with suppress(OSError, ValueError, TypeError):  # not there yet, or incomplete
                state = RankState(**json.loads(self._path(rank).read_text()))
                if rank not in self._states and self._is_stale(state):
                    continue
                previous, beat, mark = self._states.get(rank, (None, now, now))
                if previous is None or previous.process != state.process or previous.marks != state.marks:
                    mark = now
                if previous is None or previous.beats != state.beats:
                    beat = now
                self._states[rank] = (state, beat, mark)

    def _is_stale(self, state: RankState) -> bool:
        """Returns whether a file was left by a rank of an earlier start, which was killed before this process began."""
        if not self._is_visible(state) or is_running(state.process):
            return False
        return state.written < self._began + MIN_START_S

    def _check_meeting(self, now: float) -> None:
        """Ends the process with code 2 where a rank has ended or has not started in time. now: time.monotonic()."""
        waited, problem = now - self._meeting_began, None
        absent = [rank for rank in range(self.world) if rank not in self._states]
        ended = self._ended_rank()
        if ended is not None:
            problem = f"{ended} has ended before all ranks had started; see its output"
        elif absent and waited >= self.start:
            listed = ("rank " if len(absent) == 1 else "ranks ") + ", ".join(map(str, absent))
            problem = f"{listed} did not start within {waited:.0f} s: no file in {self.folder}"
        if problem is not None and not self._met:
            say(f"mmrl: {problem}; the run ends")
            release()
            end_at_once(2)

    def _check_progress(self, now: float) -> None:
        """Prints a warning for a rank that keeps this one waiting, and ends the process with code 2 after
        engine.timeout seconds. now: time.monotonic()."""
        if self.state.rank not in self._states:
            return
        waited = now - self._states[self.state.rank][2]  # since this rank last began a phase or a collective
        missing = missing_rank(self._states, self.state.rank, now, BEATS_MISSED * self.interval)
        if missing is None or waited < WARNING_SHARE * self.limit:
            self._warned = False
            return
        state, reason, idle = missing
        waited = min(waited, idle)
        if waited >= self.limit:
            say(f"mmrl: {state} {reason} for {waited:.0f} s, longer than engine.timeout={self.limit:g}; the run ends")
            release()
            end_at_once(2)
        if waited >= WARNING_SHARE * self.limit and not self._warned:
            self._warned = True
            say(f"waiting for {state}: it {reason} for {waited:.0f} s")

    def _path(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.json"


def missing_rank(
    states: dict[int, tuple[RankState, float, float]], own_rank: int, now: float, silent_after: float
) -> tuple[RankState, str, float] | None:
    """Finds the rank that `own_rank` waits for. Returns its state, the reason, and the seconds that it has been idle.

    This is the rank that has sent no heartbeat for the longest time, if that exceeds `silent_after` seconds. Otherwise
    it is the one without progress for the longest time among those that have begun fewer phases and collectives. None:
    no rank is missing. states: by rank, (state, time of the last heartbeat, time of the last progress), in seconds like
    `now`.
    """
    others = [(state, now - beat, now - mark) for rank, (state, beat, mark) in states.items() if rank != own_rank]
    silent = [(state, "has sent no heartbeat", idle) for state, idle, _ in others if idle > silent_after]
    own_marks = states[own_rank][0].marks
    behind = [(state, "has made no progress", idle) for state, _, idle in others if state.marks < own_marks]
    return max(silent or behind, key=lambda entry: entry[2], default=None)


def is_running(process: int) -> bool:
    """Returns whether a process of this host is running. A zombie, which has ended, is not."""
    if sys.platform != "linux":
        return psutil.pid_exists(process)
    try:
        # The state follows the process's name, which is in brackets. Z: zombie, X: dead.
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def process_start() -> float:
    """Returns the time at which this process started, in seconds since 1970."""
    if sys.platform != "linux":
        return psutil.Process().create_time()
    # the 20th field after the name in brackets: clock ticks from the boot of the host to the start of the process
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")  # psutil errs by up to a second
    return time.time() - age


def say(line: str) -> None:
    """Prints a line to stderr."""
    print(line, file=sys.stderr, flush=True)

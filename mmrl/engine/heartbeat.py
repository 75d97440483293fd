"""Ranks that watch each other, so that a wait has an end and names who is missing."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

FOLDER = "ranks"  # in the run directory: a file of each rank says that it lives, and where it is
SHARE_TOLD = 0.1  # of the limit, after which a wait is spoken of
BEATS_MISSED = 4  # after so many a rank is taken for silent


@dataclass
class RankState:
    """What a rank says of itself. marks: how many phases and collectives it has begun; all ranks begin the same."""

    rank: int
    host: str
    process: int
    phase: str = "start"
    marks: int = 0
    beats: int = 0

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.process} on {self.host}, in phase {self.phase})"


class Heartbeat:
    """Says of this rank that it lives, and looks at the others. Where it has waited `limit` seconds for one that has
    not moved, it ends this process with one line. A thread does this, also while a collective waits."""

    def __init__(self, folder: Path, rank: int, world: int, limit: float) -> None:
        self.folder, self.world, self.limit = folder / FOLDER, world, limit
        self.life = RankState(rank, socket.gethostname(), os.getpid())
        self.interval = min(15.0, max(0.2, limit / 100))
        # by rank, with the times of the last beat and of the last mark
        self._seen: dict[int, tuple[RankState, float, float]] = {}
        self._told = False
        self._ended = threading.Event()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._beat()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def mark(self, phase: str | None = None) -> None:
        """A collective is begun, or a phase."""
        self.life.marks += 1
        self.life.phase = phase or self.life.phase

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        with suppress(OSError):  # the other ranks' files may be there still
            self._path(self.life.rank).unlink(missing_ok=True)
            self.folder.rmdir()

    def dead(self) -> RankState | None:
        """A rank of this host whose process is gone."""
        known = [life for life, _, _ in self._seen.values() if life.host == self.life.host]
        return next((life for life in known if not runs(life.process)), None)

    def _run(self) -> None:
        while not self._ended.wait(self.interval):
            self._beat()
            self._look()
            self._judge(time.monotonic())

    def _beat(self) -> None:
        self.life.beats += 1
        path = self._path(self.life.rank)
        pending = path.with_suffix(".pending")
        with suppress(OSError):  # a full disk, or a run directory that is gone, is for others to tell
            pending.write_text(json.dumps(asdict(self.life)))
            pending.replace(path)

    def _look(self) -> None:
        now = time.monotonic()
        for rank in range(self.world):
            with suppress(OSError, ValueError, TypeError):  # not there yet, or not whole
                life = RankState(**json.loads(self._path(rank).read_text()))
                before, beat, mark = self._seen.get(rank, (None, now, now))
                if before is None or before.process != life.process or before.marks != life.marks:
                    mark = now
                if before is None or before.beats != life.beats:
                    beat = now
                self._seen[rank] = (life, beat, mark)

    def _judge(self, now: float) -> None:
        if self.life.rank not in self._seen:
            return
        waited = now - self._seen[self.life.rank][2]
        missing = missing_rank(self._seen, self.life.rank, now, BEATS_MISSED * self.interval)
        if missing is None or waited < SHARE_TOLD * self.limit:
            self._told = False
            return
        life, why, still = missing
        waited = min(waited, still)
        if waited >= self.limit:
            say(f"mmrl: {life} {why} for {waited:.0f} s, longer than engine.timeout={self.limit:g}; the run ends")
            os._exit(2)
        if waited >= SHARE_TOLD * self.limit and not self._told:
            self._told = True
            say(f"waiting for {life}: it {why} for {waited:.0f} s")

    def _path(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.json"


def missing_rank(
    seen: dict[int, tuple[RankState, float, float]], me: int, now: float, silent_after: float
) -> tuple[RankState, str, float] | None:
    """Whom rank `me` waits for, why, and for how many seconds he has not moved: a rank that is not heard of any more,
    or one that has begun fewer phases and collectives. None where nobody can be named."""
    others = [(life, now - beat, now - mark) for rank, (life, beat, mark) in seen.items() if rank != me]
    silent = [(life, "has not been heard of", beat) for life, beat, _ in others if beat > silent_after]
    behind = [(life, "has not gone on", mark) for life, _, mark in others if life.marks < seen[me][0].marks]
    return max(silent or behind, key=lambda found: found[2], default=None)


def runs(process: int) -> bool:
    """Whether a process of this host is there, and not only its exit code."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)

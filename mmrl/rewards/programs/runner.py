"""Processes that run the programs in responses: each process runs one program, with a deadline and limits, and ends."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, Literal

from mmrl.children.confinement import confinable
from mmrl.children.fork_server import ForkServer
from mmrl.children.limits import Limits

EXECUTOR = "mmrl.rewards.programs.executors:executor"
MAX_ANSWER = 1 << 26  # bytes
DEADLINE_S = 10.0


class ProgramRunner:
    """Runs programs of one kind (see `mmrl.rewards.programs.executors`), `workers` at a time.

    deadline_s, memory_gib: what one program may use. confined: a program can read libraries and write to a folder of
    its own, but cannot open TCP connections or signal other processes. Raises ValueError for numbers that are not
    positive, and if the kernel cannot confine programs.
    """

    def __init__(
        self,
        kind: str,
        *,
        deadline_s: float = DEADLINE_S,
        workers: int = 2,
        memory_gib: float = 1.0,
        confined: bool = True,
    ) -> None:
        if not (deadline_s > 0 and workers > 0 and memory_gib > 0):
            raise ValueError(
                f"deadline_s, workers and memory_gib must be positive, not {deadline_s}, {workers}, {memory_gib}"
            )
        if confined and not confinable():
            raise ValueError(
                "programs are kept from files and the network by Landlock (Linux 5.13), which this kernel lacks; set "
                "confined: false to run them with limits of time and memory only"
            )
        self.deadline_s, self.workers = deadline_s, workers
        # CPU time is the sum over threads, so a program with one thread reaches deadline_s first.
        limits = Limits(memory_gib=memory_gib, processes=32, cpu_s=2 * deadline_s + 2)
        self._fork_server = ForkServer(EXECUTOR, (kind, confined), limits)
        self._folder = tempfile.TemporaryDirectory(prefix="mmrl-programs-")
        self._scratch_numbers, self._lock = count(), threading.Lock()

    def run(self, requests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Returns an answer for each request, {"failed": the reason} for a program that raised, hung or ended its
        process. Raises UserError if no process can be started."""
        with ThreadPoolExecutor(self.workers, "program") as pool:
            return list(pool.map(self._run, requests))

    def close(self) -> None:
        """Ends all processes."""
        self._fork_server.close()
        self._folder.cleanup()

    def _run(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Runs a program in a forked worker with a scratch folder of its own. Returns its answer, or {"failed": the
        reason}."""
        with self._lock:
            scratch = Path(self._folder.name) / str(next(self._scratch_numbers))
        scratch.mkdir()
        try:
            worker = self._fork_server.acquire()
            answer = worker.call({**request, "scratch": str(scratch)}, self.deadline_s, MAX_ANSWER)
        except TimeoutError:
            return {"failed": f"it took more than {self.deadline_s:g} s"}
        except ConnectionError as error:
            return {"failed": f"it ended its process: {error}"}
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        worker.fork_server.terminate(worker)  # the next program gets a new process, without changes by this one
        return answer


class ProgramReward:
    """A reward that runs programs of one `kind`. The options are those of `ProgramRunner`."""

    kind: ClassVar[str]
    scope: Literal["sample"] = "sample"

    def __init__(
        self,
        *,
        deadline_s: float = DEADLINE_S,
        workers: int = 2,
        memory_gib: float = 1.0,
        confined: bool = True,
    ) -> None:
        self.runner = ProgramRunner(
            self.kind, deadline_s=deadline_s, workers=workers, memory_gib=memory_gib, confined=confined
        )

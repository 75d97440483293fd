"""The training process's handle of a worker: a child process with a log."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmrl.children.child import Child, Launch, Lost, Raised, Refused
from mmrl.children.processes import tail
from mmrl.errors import UserError

SERVICE = "mmrl.workers.worker:RolloutWorker"
TAIL = 1 << 14  # bytes at the end of a log that are searched for its last line


class Handle:
    """A rollout worker. number: its index. weights: version of its weights, 0 before it has any."""

    def __init__(self, number: int, log: Path, launch: Launch) -> None:
        self.number, self.log, self.child = number, log, Child(SERVICE, launch)
        self.weights = 0

    def ask(self, message: bytes, seconds: float, shared: Sequence[Any] = ()) -> Any:
        """Returns the answer to an encoded message. Raises Lost if the worker ends or does not answer within `seconds`,
        and UserError for an error in the worker and if no host has room for it."""
        try:
            return self.child.ask(message, seconds, shared=shared)
        except TimeoutError:
            raise Lost(f"it did not answer within rollout.workers.timeout={seconds:g} s") from None
        except Lost as error:
            raise Lost(f"it ended{'' if error.code is None else f' with {error.code}'}{self._last_line()}") from None
        except (Refused, Raised) as error:
            raise UserError(f"rollout worker {self.number}: {error}") from None

    def stop(self) -> None:
        """Kills the worker with all processes that it started."""
        self.child.stop()
        self.weights = 0

    def _last_line(self) -> str:
        """Returns the last line of the log for an error message. If the worker runs on another host, the log is written
        when Ray reports its end."""
        if not self.log.exists():
            return ""
        lines = tail(self.log, TAIL).split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"; {self.log} says: {last[:300]}" if last else f", see {self.log}"

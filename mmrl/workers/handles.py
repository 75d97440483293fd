"""A worker as the training process sees it: a child whose log says why it ended."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmrl.children.child import Child, Launch, Lost, Raised, Refused
from mmrl.children.processes import tail
from mmrl.errors import UserError

SERVICE = "mmrl.workers.worker:RolloutWorker"
TAIL = 1 << 14  # bytes of a log


class Handle:
    """One worker. number: of the worker. weights: the number of those that it has, 0 before it has any."""

    def __init__(self, number: int, log: Path, launch: Launch) -> None:
        self.number, self.log, self.child = number, log, Child(SERVICE, launch)
        self.weights = 0

    def ask(self, message: bytes, seconds: float, shared: Sequence[Any] = ()) -> Any:
        """Its answer. Raises Lost if it ends, or does not answer within so many seconds; UserError for what went wrong
        there, and if there is no room for it."""
        try:
            return self.child.ask(message, seconds, shared=shared)
        except TimeoutError:
            raise Lost(f"it did not answer within rollout.workers.timeout={seconds:g} s") from None
        except Lost as error:
            raise Lost(f"it ended{'' if error.code is None else f' with {error.code}'}{self._last_words()}") from None
        except (Refused, Raised) as error:
            raise UserError(f"rollout worker {self.number}: {error}") from None

    def stop(self) -> None:
        """Ends it with all that it started."""
        self.child.stop()
        self.weights = 0

    def _last_words(self) -> str:
        """The last line of its log, which that of another host is only after Ray has told of its end."""
        if not self.log.exists():
            return ""
        lines = tail(self.log, TAIL).split("\n")
        said = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"; {self.log} says: {said[:300]}" if said else f", see {self.log}"

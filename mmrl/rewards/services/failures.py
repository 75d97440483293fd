"""Failures of rewards: samples that could not be scored are counted and warned of."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from mmrl.rewards.types import Score
from mmrl.rollouts import Sample

Cause = Literal["deadline", "crash", "error", "not tried"]
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Failure:
    """The reason for a missing score. deadline: it took too long; crash: its process ended; error: it raised; not
    tried: too much of its batch had taken too long."""

    cause: Cause
    what: str


class Failures:
    """Counts of one reward's failures: `causes` by cause, `prompts` by the id of the prompt.

    late: the score of a sample that was not scored in time; None leaves it unscored. most_late: calls of a batch that
    may time out; after so many the rest of the batch is late without a try, so that a batch of hanging calls costs a
    bounded time.
    """

    def __init__(self, name: str, late: Score = None, most_late: int = 32) -> None:
        self.name, self.late, self.most_late = name, late, most_late
        self.causes: Counter[Cause] = Counter()
        self.prompts: Counter[str] = Counter()
        self.reason: str | None = None  # why the first sample of the batch was lost
        self._waits = 0  # calls of the batch that timed out
        self._counting = threading.Lock()

    def begin(self) -> None:
        """Starts another batch."""
        self._waits, self.reason = 0, None

    def waited(self, limit_s: float) -> Failure:
        """Returns the failure of a call that timed out after `limit_s` seconds. Warns at the one after which the rest
        of the batch is not tried."""
        with self._counting:
            self._waits += 1
            waits = self._waits
        if waits == self.most_late:
            _log.warning(
                "reward %s gave no answer in %g s %d times in one batch (max_timeouts): of what is left of the batch "
                "nothing is tried, and its score is %s",
                self.name,
                limit_s,
                waits,
                self._shown(self.late),
            )
        return Failure("deadline", f"no answer in {limit_s:g} s")

    def skips(self) -> Failure | None:
        """Returns the failure of every further sample of the batch, once too many calls have timed out; None before."""
        return Failure("not tried", "the batch had hung too often") if self._waits >= self.most_late else None

    def lost(self, sample: Sample, failure: Failure) -> Score:
        """Counts the failed sample and returns its score. Warns at the first, tenth, hundredth ... failure of a cause,
        except of samples that were not tried."""
        self.causes[failure.cause] += 1
        self.reason = self.reason or f"it failed on prompt {sample.prompt.id}: {failure.what}"
        self.prompts[sample.prompt.id] += 1
        count = self.causes[failure.cause]
        score = self.late if failure.cause in ("deadline", "not tried") else None
        if failure.cause != "not tried" and str(count).strip("0") == "1":
            _log.warning(
                "reward %s failed on prompt %s: %s; its score is %s (%s number %d, prompts so far: %d)",
                self.name,
                sample.prompt.id,
                failure.what,
                self._shown(score),
                failure.cause,
                count,
                len(self.prompts),
            )
        return score

    @staticmethod
    def _shown(score: Score) -> str:
        return "left out" if score is None else f"{score:g}"

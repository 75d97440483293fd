"""Samples that a reward could not score because it failed: each is counted, and the user is told before he wonders."""

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
    """Why there is no score. deadline: it took too long; crash: its process ended; error: it raised; not tried: too
    much of its batch had taken too long."""

    cause: Cause
    what: str


class Failures:
    """What one reward has lost: `causes` counts by cause, `prompts` by the id of the prompt.

    late: the score of a sample that was not scored in time; None leaves it unscored. most_late: waits of a batch that
    may end without a score; what is left of the batch then is late without a try, so that a batch of answers that all
    hang costs a bounded time.
    """

    def __init__(self, name: str, late: Score = None, most_late: int = 32) -> None:
        self.name, self.late, self.most_late = name, late, most_late
        self.causes: Counter[Cause] = Counter()
        self.prompts: Counter[str] = Counter()
        self._waits = 0  # of the batch that came to nothing
        self._counting = threading.Lock()

    def begin(self) -> None:
        """Another batch begins."""
        self._waits = 0

    def waited(self, limit_s: float) -> Failure:
        """The failure of a call that gave no answer in `limit_s` seconds. The one after which nothing more of the batch
        is tried is told."""
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
                self._told(self.late),
            )
        return Failure("deadline", f"no answer in {limit_s:g} s")

    def skips(self) -> Failure | None:
        """The failure of every further sample of the batch, once too many calls have hung."""
        return Failure("not tried", "the batch had hung too often") if self._waits >= self.most_late else None

    def lost(self, sample: Sample, failure: Failure) -> Score:
        """Counts the sample and gives its score. A warning is logged the first time, the tenth, the hundredth and so on
        that something of this cause happens, unless the whole batch was told of."""
        self.causes[failure.cause] += 1
        self.prompts[sample.prompt.id] += 1
        count = self.causes[failure.cause]
        score = self.late if failure.cause in ("deadline", "not tried") else None
        if failure.cause != "not tried" and str(count).strip("0") == "1":
            _log.warning(
                "reward %s failed on prompt %s: %s; its score is %s (%s number %d, prompts so far: %d)",
                self.name,
                sample.prompt.id,
                failure.what,
                self._told(score),
                failure.cause,
                count,
                len(self.prompts),
            )
        return score

    @staticmethod
    def _told(score: Score) -> str:
        return "left out" if score is None else f"{score:g}"

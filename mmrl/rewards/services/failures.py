"""Counts the samples that a reward failed to score, and logs warnings."""

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
    """The reason why a sample has no score. cause: "deadline": it took too long; "crash": its process ended; "error":
    the reward raised; "not tried": too many calls of its batch had timed out. message: the reason in a few words, for a
    warning."""

    cause: Cause
    message: str


class Failures:
    """Counts one reward's failures: `causes` by cause, `prompts` by the prompt's id.

    timeout_score: the score of a sample that was not scored in time; None leaves it unscored. max_timeouts: calls of a
    batch that may time out. After that many, the rest of the batch fails without a try, so that a batch of hanging
    calls costs a bounded time.
    """

    def __init__(self, name: str, timeout_score: Score = None, max_timeouts: int = 32) -> None:
        """name: the reward's, for warnings. timeout_score: the score of a sample that was not scored in time.
        max_timeouts: calls of a batch that may time out before the rest is skipped."""
        self.name, self.timeout_score, self.max_timeouts = name, timeout_score, max_timeouts
        self.causes: Counter[Cause] = Counter()
        self.prompts: Counter[str] = Counter()
        self.reason: str | None = None  # why the first failed sample of the batch failed
        self._num_timeouts = 0  # calls of the batch that timed out
        self._lock = threading.Lock()

    def start_batch(self) -> None:
        """Starts a new batch."""
        self._num_timeouts, self.reason = 0, None

    def record_timeout(self, limit_s: float) -> Failure:
        """Counts a call that timed out after `limit_s` seconds and returns its failure. Logs a warning when
        `max_timeouts` calls of a batch have timed out."""
        with self._lock:
            self._num_timeouts += 1
            num_timeouts = self._num_timeouts
        if num_timeouts == self.max_timeouts:
            _log.warning(
                "reward %s did not answer within %g s, %d times in one batch (max_timeouts): the rest of the batch "
                "is not tried, and its score is %s",
                self.name,
                limit_s,
                num_timeouts,
                self._format_score(self.timeout_score),
            )
        return Failure("deadline", f"no answer in {limit_s:g} s")

    def skipped(self) -> Failure | None:
        """Returns the failure that all further samples of the batch get, if too many calls have timed out; else
        None."""
        return (
            Failure("not tried", "too many calls of this batch timed out before (max_timeouts)")
            if self._num_timeouts >= self.max_timeouts
            else None
        )

    def record(self, sample: Sample, failure: Failure) -> Score:
        """Counts a failed sample and returns its score. Logs a warning at the first, tenth, hundredth ... failure of a
        cause, except for samples that were not tried."""
        self.causes[failure.cause] += 1
        self.reason = self.reason or f"it failed on prompt {sample.prompt.id}: {failure.message}"
        self.prompts[sample.prompt.id] += 1
        count = self.causes[failure.cause]
        score = self.timeout_score if failure.cause in ("deadline", "not tried") else None
        if failure.cause != "not tried" and str(count).strip("0") == "1":  # 1, 10, 100, ...
            _log.warning(
                "reward %s failed on prompt %s: %s; its score is %s (%s: %d so far; prompts with failures: %d)",
                self.name,
                sample.prompt.id,
                failure.message,
                self._format_score(score),
                failure.cause,
                count,
                len(self.prompts),
            )
        return score

    @staticmethod
    def _format_score(score: Score) -> str:
        return "left out" if score is None else f"{score:g}"

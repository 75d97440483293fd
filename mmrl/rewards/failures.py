"""Samples that a reward could not score because it failed: each is counted, and the user is told before he wonders."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from mmrl.rewards.types import Score
from mmrl.rollouts import Sample

Cause = Literal["deadline", "crash", "error"]
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Failure:
    """Why there is no score. deadline: it took too long; crash: its process ended; error: it raised."""

    cause: Cause
    what: str


class Failures:
    """What one reward has lost: `causes` counts by cause, `prompts` by the id of the prompt.

    late: the score of a sample that was not scored in time; None leaves it unscored.
    """

    def __init__(self, name: str, late: Score = None) -> None:
        self.name, self.late = name, late
        self.causes: Counter[Cause] = Counter()
        self.prompts: Counter[str] = Counter()

    def lost(self, sample: Sample, failure: Failure) -> Score:
        """Counts the sample and gives its score. A warning is logged the first time, the tenth, the hundredth and so on
        that something of this cause happens."""
        self.causes[failure.cause] += 1
        self.prompts[sample.prompt.id] += 1
        count = self.causes[failure.cause]
        score = self.late if failure.cause == "deadline" else None
        if str(count).strip("0") == "1":
            _log.warning(
                "reward %s failed on prompt %s: %s; its score is %s (%s number %d, prompts so far: %d)",
                self.name,
                sample.prompt.id,
                failure.what,
                "left out" if score is None else f"{score:g}",
                failure.cause,
                count,
                len(self.prompts),
            )
        return score

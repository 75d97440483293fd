"""Tries some rows of a file, evenly spread, before the first step: those that the model can not read are left out."""

from __future__ import annotations

import math
import time
from pathlib import Path

from mmrl.errors import UserError
from mmrl.protocols.parts import FittedSource, Task
from mmrl.report.run import wilson
from mmrl.runtime.progress import display

TRIED = 200  # rows of a source
LEAST = 50  # rows, from which on the share of the whole file is judged
CERTAINTY = 3.0  # standard errors by which it has to be beyond what is allowed
SECONDS = 10.0  # for a source: rows that are not tried then are tried when they are used


def try_sources(task: Task, held_out: int) -> None:
    """Tries rows to train on, and of the `held_out` first rows that are held out. Raises UserError as `try_rows`."""
    if isinstance(task.train, FittedSource):
        try_rows(task.train, len(task.train))
    if isinstance(task.evaluation, FittedSource):
        try_rows(task.evaluation, min(held_out, len(task.evaluation)))


def try_rows(source: FittedSource, count: int, seconds: float = SECONDS) -> int:
    """Tries up to TRIED of the first `count` rows; each that does not fit is named and left out. Returns how many were
    tried.

    Raises UserError beyond the source's `max_bad_share` of all rows, and where the rows that were tried show with
    CERTAINTY (Wilson, 1927) that more of them are bad.
    """
    wanted, ends, bad = min(count, TRIED), time.monotonic() + seconds, 0
    with display.work(f"trying rows of {Path(source.name).name}", wanted) as work:
        for tried, position in enumerate(spread_order(wanted), 1):
            bad += not source.fits(position * count // wanted)
            if tried >= LEAST and wilson(bad, tried, CERTAINTY)[0] > source.max_bad_share:
                raise UserError(
                    f"{source.name}: {bad} of the {tried} rows that were tried do not fit, see above, so that more "
                    f"than max_bad_share={source.max_bad_share:g} of all would be left out; mend what the lines above "
                    "name, or raise task.data.max_bad_share"
                )
            work.advance(1)
            if time.monotonic() > ends:
                return tried
    return wanted


def spread_order(count: int) -> list[int]:
    """Returns 0 .. count - 1 in golden-ratio order: every prefix covers the range evenly. Bad rows often stand
    together in a file, and are met early so."""
    step = max(1, round(count * (math.sqrt(5) - 1) / 2))
    while math.gcd(step, count) > 1:
        step += 1
    return [index * step % count for index in range(count)]

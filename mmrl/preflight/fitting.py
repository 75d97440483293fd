"""Checks a sample of the rows of each data file before the first step. Rows that the model cannot read are left out; if
too many of them are bad, training does not start."""

from __future__ import annotations

import math
import time
from pathlib import Path

from mmrl.errors import UserError
from mmrl.protocols.parts import FittedSource, Task
from mmrl.report.intervals import wilson
from mmrl.runtime.progress import display

MAX_ROWS = 200  # rows of a source that are checked
MIN_ROWS = 50  # rows after which the share of bad ones in the whole file is judged
STANDARD_ERRORS = 3.0  # width of the Wilson interval whose lower end is compared with max_bad_share
TIME_LIMIT = 10.0  # seconds for a source; rows that are not checked now are checked when they are used


def try_sources(task: Task, held_out: int) -> None:
    """Checks rows of the training source and of the first `held_out` rows for evaluation. Raises UserError as
    `try_rows`."""
    if isinstance(task.train, FittedSource):
        try_rows(task.train, len(task.train))
    if isinstance(task.evaluation, FittedSource):
        try_rows(task.evaluation, min(held_out, len(task.evaluation)))


def try_rows(source: FittedSource, num_rows: int, seconds: float = TIME_LIMIT) -> int:
    """Checks up to MAX_ROWS of the first `num_rows` rows, for at most `seconds`. Returns how many were checked.

    Each row that does not fit is named in a warning and left out. Raises UserError if the lower end of the Wilson
    interval (1927) for the share of bad rows exceeds the source's `max_bad_share`.
    """
    num_tried, deadline, num_bad = min(num_rows, MAX_ROWS), time.monotonic() + seconds, 0
    with display.work(f"checking rows of {Path(source.name).name}", num_tried) as work:
        for num_checked, position in enumerate(golden_ratio_order(num_tried), 1):
            num_bad += not source.fits(position * num_rows // num_tried)
            # [0]: the lower end of the interval
            if num_checked >= MIN_ROWS and wilson(num_bad, num_checked, STANDARD_ERRORS)[0] > source.max_bad_share:
                raise UserError(
                    f"{source.name}: {num_bad} of {num_checked} checked rows cannot be used, see the warnings above, "
                    f"so that more than max_bad_share={source.max_bad_share:g} of all rows would be left out; fix the "
                    "rows, or raise task.data.max_bad_share"
                )
            work.advance(1)
            if time.monotonic() > deadline:
                return num_checked
    return num_tried


def golden_ratio_order(num_rows: int) -> list[int]:
    """Returns the numbers 0 .. num_rows - 1 in golden-ratio order, of which every prefix covers the range evenly.

    Bad rows are often neighbours in a file; in this order some of them are found early.
    """
    step = max(1, round(num_rows * (math.sqrt(5) - 1) / 2))
    while math.gcd(step, num_rows) > 1:
        step += 1
    return [index * step % num_rows for index in range(num_rows)]

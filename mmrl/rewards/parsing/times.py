"""Times and time intervals in text, in seconds."""

from __future__ import annotations

import json
import re
from typing import Any

from mmrl.rewards.parsing.responses import extract_answer
from mmrl.rewards.parsing.typography import normalize_typography

_CLOCK = r"(?:(\d++):)?(\d++):(\d\d)(?:[.,](\d++))?+(?![\d:])"
_UNITS = {
    "h": 3600.0,
    "hr": 3600.0,
    "hrs": 3600.0,
    "hour": 3600.0,
    "hours": 3600.0,
    "m": 60.0,
    "min": 60.0,
    "mins": 60.0,
    "minute": 60.0,
    "minutes": 60.0,
    "s": 1.0,
    "sec": 1.0,
    "secs": 1.0,
    "second": 1.0,
    "seconds": 1.0,
    "ms": 0.001,
    "\u5c0f\u65f6": 3600.0,
    "\u65f6": 3600.0,
    "\u6642\u9593": 3600.0,
    "\u5206": 60.0,
    "\u5206\u949f": 60.0,
    "\u79d2": 1.0,
    "\u79d2\u949f": 1.0,
}
_UNIT = rf"(?:\s*+({'|'.join(sorted(_UNITS, key=len, reverse=True))})(?![A-Za-z]))"
_TIME = re.compile(rf"(?<![A-Za-z\d.])(?:{_CLOCK}|(\d++(?:\.\d++)?+|\.\d++){_UNIT}?+)", re.IGNORECASE)
_RUN_TOGETHER = re.compile(r"(\d)(h|m|min)(?=\d)")  # 1m3s
_BETWEEN_UNITS = re.compile(r"\s*+(?:,\s*+)?(?:and\s++)?")


def parse_times(text: str) -> list[float]:
    """Returns every time of a string in seconds, in order: 3.5, 3.5 s, 1:03, 0:01:03.5, 00:01:03,500, 1m3s, 1 minute 3
    seconds.

    A number without a unit gets the unit of the time after it: "1 to 2 minutes".
    """
    times: list[tuple[float, float | None, int]] = []  # (seconds, or a number without unit; unit in s; end in the text)
    text = normalize_typography(text)
    if _RUN_TOGETHER.search(text):
        text = _RUN_TOGETHER.sub(r"\1\2 ", text)
    for match in _TIME.finditer(text):
        hours, minutes, whole_seconds, decimals, number, unit_name = match.groups()  # of a clock, or number and unit
        if whole_seconds is not None:
            fraction = float(f"0.{decimals}") if decimals else 0.0
            seconds = int(hours or 0) * 3600 + int(minutes) * 60 + int(whole_seconds) + fraction
            times.append((seconds, 1.0, match.end()))
            continue
        unit = _UNITS[unit_name.lower()] if unit_name else None
        value = float(number) * (unit or 1.0)
        if times and unit is not None and _continues(text, times[-1], unit, match.start()):
            times[-1] = (times[-1][0] + value, unit, match.end())
        else:
            times.append((value, unit, match.end()))
    for i in range(len(times) - 1, 0, -1):  # from the end, since a unit may be for several numbers before it
        (value, unit, end), next_unit = times[i - 1], times[i][1]
        if unit is None and next_unit is not None:
            times[i - 1] = (value * next_unit, next_unit, end)
    return [seconds for seconds, _, _ in times]


def gold_times(gold: Any) -> list[float]:
    """Reads the times of a gold answer, in seconds: a list of numbers, a dict, or a string in the form of a
    response."""
    if isinstance(gold, list) and all(type(part) in (int, float) for part in gold):
        return [float(part) for part in gold]
    return parse_times(extract_answer(gold) if isinstance(gold, str) else json.dumps(gold, default=str))


def _continues(text: str, previous: tuple[float, float | None, int], unit: float, begin: int) -> bool:
    """Returns whether a time in a smaller unit is added to the previous one, as in 1 minute 3 seconds. previous:
    its seconds, unit and end in the text. unit, begin: unit of the time, and the index at which it begins."""
    _, previous_unit, end = previous
    # <= 1: only hours and minutes are continued
    if previous_unit is None or previous_unit <= unit or previous_unit <= 1:
        return False
    return _BETWEEN_UNITS.fullmatch(text, end, begin) is not None

"""Alarms of a check, and all that one check came to know."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from mmrl.errors import UserError
from mmrl.settings.origins import RecipeNotRun

Severity = Literal["refused", "warned"]
ROWS_NAMED = 3


@dataclass(frozen=True)
class Alarm:
    """Something that is wrong. part: of the job, such as rewards. refused: training cannot go well with it; warned: it
    can go on, and the user should look."""

    part: str
    severity: Severity
    text: str


@dataclass
class Findings:
    """Alarms, lines about what was looked at, and what was not looked at, by part of the job."""

    alarms: list[Alarm] = field(default_factory=list)
    facts: list[tuple[str, str]] = field(default_factory=list)
    unread: list[tuple[str, str]] = field(default_factory=list)

    @property
    def refused(self) -> bool:
        return any(alarm.severity == "refused" for alarm in self.alarms)

    def add(self, alarms: Iterable[Alarm]) -> None:
        """Adds alarms that are not there yet."""
        for alarm in alarms:
            if alarm.text not in {present.text for present in self.alarms}:
                self.alarms.append(alarm)

    @contextmanager
    def guarded(self, part: str) -> Iterator[None]:
        """Makes an alarm of an error inside: the line of a UserError, type and text of any other. What a recipe that
        has not been run will leave is noted as not read."""
        try:
            yield
        except RecipeNotRun as error:
            self.unread.append((part, one_line(str(error))))
        except UserError as error:
            self.add([Alarm(part, "refused", one_line(str(error)))])
        except Exception as error:  # whatever somebody else's files and code raise
            self.add([Alarm(part, "refused", one_line(f"{type(error).__name__}: {error}"))])


def one_line(text: str) -> str:
    return " ".join(text.split())


def some(names: Iterable[str]) -> str:
    """Returns the first names and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - ROWS_NAMED} more" if len(listed) > ROWS_NAMED else ""
    return ", ".join(listed[:ROWS_NAMED]) + more

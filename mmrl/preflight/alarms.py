"""Alarms, and the report of a check."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from mmrl.errors import UserError
from mmrl.settings.origins import RecipeNotRun

Severity = Literal["refused", "warned"]
MAX_NAMES = 3  # names that `abbreviate` lists


@dataclass(frozen=True)
class Alarm:
    """A problem with a job. part: where, such as "rewards". severity: "refused" if training cannot work with it,
    "warned" if it can and the user should look. text: one line."""

    part: str
    severity: Severity
    text: str


@dataclass
class CheckReport:
    """The result of a check: its alarms, and lines (part of the job, text) about what was inspected and what was
    skipped."""

    alarms: list[Alarm] = field(default_factory=list)
    inspected: list[tuple[str, str]] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)

    @property
    def refused(self) -> bool:
        """Returns whether training cannot work, since an alarm is "refused"."""
        return any(alarm.severity == "refused" for alarm in self.alarms)

    def add(self, alarms: Iterable[Alarm]) -> None:
        """Adds alarms, except those whose text is already there."""
        for alarm in alarms:
            if alarm.text not in {known.text for known in self.alarms}:
                self.alarms.append(alarm)

    @contextmanager
    def catch_errors(self, part: str) -> Iterator[None]:
        """Context that turns an exception into an alarm: a UserError by its text, any other one by type and text. If an
        input is the output of a recipe that has not been run, it is noted as skipped."""
        try:
            yield
        except RecipeNotRun as error:
            self.skipped.append((part, one_line(str(error))))
        except UserError as error:
            self.add([Alarm(part, "refused", one_line(str(error)))])
        except Exception as error:  # the user's files and code may raise anything
            self.add([Alarm(part, "refused", one_line(f"{type(error).__name__}: {error}"))])


def one_line(text: str) -> str:
    """Joins the lines of a text by spaces."""
    return " ".join(text.split())


def abbreviate(names: Iterable[str]) -> str:
    """Returns the first MAX_NAMES names and the number of further ones, as in "a, b, c and 5 more"."""
    all_names = list(names)
    rest = f" and {len(all_names) - MAX_NAMES} more" if len(all_names) > MAX_NAMES else ""
    return ", ".join(all_names[:MAX_NAMES]) + rest

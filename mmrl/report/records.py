"""Reads a run directory: configuration, logged metrics, and how the run ended."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from mmrl.errors import UserError
from mmrl.report import lock
from mmrl.runtime.progress import duration_text

Row = dict[str, float]
END = "end.json"  # written by a run when it ends: its state and a sentence
WEIGHTS = "run.json"  # a file beside the final weights, with their step


@dataclass(frozen=True)
class Series:
    """One metric over the steps in which it was logged. Values may be NaN or infinite."""

    name: str
    steps: list[int]
    values: list[float]

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def finite(self) -> list[float]:
        return [value for value in self.values if math.isfinite(value)]

    @property
    def early(self) -> list[float]:
        """The first quarter of the finite values, at least one if there is any."""
        return self.finite[: max(1, len(self.finite) // 4)]

    @property
    def late(self) -> list[float]:
        """The last quarter of the finite values, at least one if there is any."""
        return self.finite[-max(1, len(self.finite) // 4) :]


@dataclass(frozen=True)
class Ending:
    """The end of a run. state: finished, running, stopped (by a signal), failed, killed, unknown or empty."""

    state: str
    sentence: str


@dataclass(frozen=True)
class RunRecord:
    """The content of a run directory. rows: the metrics of training steps. evaluations: those of evaluations."""

    folder: Path
    config: dict[str, Any]
    config_text: str
    versions: dict[str, str]
    rows: list[Row]
    evaluations: list[Row]
    ending: Ending
    problems: list[str] = field(default_factory=list)  # a sentence for each thing that could not be read

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def step(self) -> int:
        """The last logged step; 0 where none was."""
        return int(max((row["step"] for row in [*self.rows, *self.evaluations]), default=0))

    @property
    def steps(self) -> int | None:
        """The number of steps in the configuration; None where it cannot be read."""
        steps = self.config.get("steps")
        return steps if isinstance(steps, int) else None

    @property
    def names(self) -> list[str]:
        """All metrics, in the order of their first line."""
        names = {name: None for row in [*self.rows, *self.evaluations] for name in row}
        return [name for name in names if name not in ("step", "time")]

    def series(self, name: str) -> Series:
        """Returns the values of a metric: over evaluations if its name begins with evaluation/ or is time/evaluation,
        else over training steps."""
        held_out = name.startswith("evaluation/") or name == "time/evaluation"
        rows = [row for row in (self.evaluations if held_out else self.rows) if name in row]
        return Series(name, [int(row["step"]) for row in rows], [row[name] for row in rows])

    def key(self, path: str, default: Any = None) -> Any:
        """Returns the value of the configuration at a dotted path, or `default`."""
        value: object = self.config
        for part in path.split("."):
            if not isinstance(value, dict) or part not in value:
                return default
            value = value[part]
        return value


def read_run(folder: str | Path) -> RunRecord:
    """Reads the run in `folder`, even an incomplete or damaged one. Raises UserError if there is no such folder."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder} is not a run directory: there is no such folder")
    problems: list[str] = []
    config_text = _text(folder / "config.yaml", problems)
    config = _mapping(folder / "config.yaml", lambda: yaml.safe_load(config_text or ""), config_text, problems)
    versions_text = _text(folder / "versions.json", problems)
    versions = _mapping(folder / "versions.json", lambda: json.loads(versions_text or ""), versions_text, problems)
    rows, evaluations = _metrics(folder / "metrics.jsonl", problems)
    ending = _ending(folder, rows, evaluations, config, problems)
    steps, last = config.get("steps"), max((int(row["step"]) for row in rows), default=0)
    if ending.state == "finished" and isinstance(steps, int) and rows and last < steps:
        problems.append(f"metrics.jsonl ends at step {last}, but the run finished at step {steps}.")
    if skipped_files := sorted(path.name for path in folder.glob("bad-step-*.jsonl")):
        problems.append(
            f"Updates were skipped; their rollouts are in "
            f"{', '.join(skipped_files[:3])}{', ...' * (len(skipped_files) > 3)}."
        )
    version_texts = {str(name): str(version) for name, version in versions.items()}
    return RunRecord(folder, config, config_text or "", version_texts, rows, evaluations, ending, problems)


def parse_row(line: bytes) -> dict[str, Any] | None:
    """Parses a line of metrics.jsonl. Returns None if it is incomplete or damaged."""
    try:
        row = json.loads(line)
    except ValueError:  # no JSON, or no UTF-8
        return None
    complete = isinstance(row, dict) and isinstance(row.get("step"), int) and line.endswith(b"\n")
    return row if complete else None


def _text(path: Path, problems: list[str]) -> str | None:
    """Returns the text of a file. If it cannot be read, adds a sentence to `problems` and returns None."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error})"
        problems.append(f"{path.name} {reason}.")
        return None


def _mapping(path: Path, read: Callable[[], object], text: str | None, problems: list[str]) -> dict[str, Any]:
    """Returns the mapping that `read` parses; {} if the file is missing or damaged, with a sentence in `problems`.

    path: for messages. text: the content of the file, None if it could not be read.
    """
    if text is None:
        return {}
    if not text.strip():
        problems.append(f"{path.name} is empty.")
        return {}
    try:
        content = read()
    except (ValueError, yaml.YAMLError) as error:
        problems.append(f"{path.name} is damaged: {' '.join(str(error).split())[:200]}.")
        return {}
    if not isinstance(content, dict):
        problems.append(f"{path.name} is damaged: it is not a mapping.")
        return {}
    return content


def _metrics(path: Path, problems: list[str]) -> tuple[list[Row], list[Row]]:
    """Reads metrics.jsonl. Returns the rows of training steps and of evaluations, sorted by step.

    If a step has several lines the last one is used. Damaged lines are left out and noted in `problems`.
    """
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        reason = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
        problems.append(f"{path.name} {reason}, so there are no curves.")
        return [], []
    # training steps and evaluations, indexed by `held_out`: False is 0, True is 1
    by_step: tuple[dict[int, Row], dict[int, Row]] = ({}, {})
    num_damaged, num_non_numeric = 0, 0
    for number, line in enumerate(lines):
        row = parse_row(line)
        if row is None:
            num_damaged += number + 1 < len(lines) or line.endswith(b"\n")  # the last line may still be being written
            continue
        numbers = {n: float(v) for n, v in row.items() if isinstance(v, int | float) and not isinstance(v, bool)}
        num_non_numeric += len(numbers) < len(row)
        held_out = any(name.startswith("evaluation/") for name in numbers)
        by_step[held_out][row["step"]] = numbers
    if num_damaged:
        problems.append(f"{num_damaged} of {len(lines)} lines of {path.name} are damaged and left out.")
    if num_non_numeric:
        problems.append(f"{num_non_numeric} lines of {path.name} have values that are not numbers; these are left out.")
    if not lines:
        problems.append(f"{path.name} is empty.")
    rows, evaluations = ([part[step] for step in sorted(part)] for part in by_step)
    return rows, evaluations


def _ending(
    folder: Path, rows: list[Row], evaluations: list[Row], config: dict[str, Any], problems: list[str]
) -> Ending:
    """Returns how a run ended, or that it is running, by its lock, its end file, its final weights and its metrics."""
    step = int(max((row["step"] for row in [*rows, *evaluations]), default=0))
    steps = config.get("steps")
    progress = f"step {step}" + (f" of {steps}" if isinstance(steps, int) else "")
    owner = _owner(folder / lock.LOCK_FILE)
    owner_text = f"process {owner.get('process')} on {owner.get('host')}, since {owner.get('since')}"
    if owner and lock.is_alive(owner):
        return Ending("running", f"It is running ({owner_text}) and has logged {progress}.")
    if owner and owner.get("host") != lock.this_process()["host"]:
        ago = f", {duration_text(time.time() - rows[-1]['time'])} ago" if rows and "time" in rows[-1] else ""
        return Ending(
            "unknown", f"It may be running on another host ({owner_text}); the last it logged is {progress}{ago}."
        )
    end = _json(folder / END)
    if not end and (folder / END).exists():
        problems.append(f"{END} is damaged: how the run ended is concluded from the other files.")
    if end:
        return Ending(str(end.get("state", "unknown")), str(end.get("sentence", "")))
    if ended := _json(folder / "final" / WEIGHTS):
        return Ending("finished", f"It reached its end at step {ended.get('step', step)}.")
    if owner:
        return Ending("killed", f"It was killed at {progress}: {owner_text}, ended without recording why.")
    if not rows and not evaluations:
        return Ending("empty", "It has not logged anything.")
    return Ending("unknown", f"It stopped at {progress} without recording why.")


def _owner(path: Path) -> dict[str, Any]:
    """Returns the owner in a lock file; {} if there is no file, or it names no process."""
    if not path.is_file():
        return {}
    with path.open() as file:
        owner = lock.read_owner(file)
    return owner if isinstance(owner.get("process"), int) else {}


def _json(path: Path) -> dict[str, Any]:
    """Returns the mapping in a JSON file; empty where it is missing or damaged."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def flatten(tree: object, path: str = "") -> dict[str, Any]:
    """Returns the leaves of nested mappings by dotted keys. A list is a leaf unless it contains mappings.

    path: the dotted key of `tree` itself.
    """
    if isinstance(tree, Mapping):
        inner = ((f"{path}.{key}" if path else str(key), value) for key, value in tree.items())
    elif isinstance(tree, list) and any(isinstance(item, Mapping) for item in tree):
        inner = ((f"{path}.{i}", value) for i, value in enumerate(tree))
    else:
        return {path: tree}
    return {key: value for prefix, item in inner for key, value in flatten(item, prefix).items()}

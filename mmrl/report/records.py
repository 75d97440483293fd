"""Reads a run directory: logged metrics, how the run ended, and what can not be read."""

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
END = "end.json"  # how a run ended, as it recorded itself
WEIGHTS = "run.json"  # beside final weights: their step


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
    """The content of a run directory. rows, evaluations: the lines of metrics.jsonl by kind."""

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
        """The number of steps in the configuration; None where it can not be read."""
        steps = self.config.get("steps")
        return steps if isinstance(steps, int) else None

    @property
    def names(self) -> list[str]:
        """All metrics, in the order of their first line."""
        names = {name: None for row in [*self.rows, *self.evaluations] for name in row}
        return [name for name in names if name not in ("step", "time")]

    def series(self, name: str) -> Series:
        """Returns a metric of the training steps, or of the evaluations if its name begins with evaluation/ or is
        time/evaluation."""
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
        problems.append(f"metrics.jsonl breaks off at step {last}, though the run reached its end, step {steps}.")
    if bad := sorted(path.name for path in folder.glob("bad-step-*.jsonl")):
        problems.append(f"Updates were skipped; their rollouts are in {', '.join(bad[:3])}{', ...' * (len(bad) > 3)}.")
    version_texts = {str(name): str(version) for name, version in versions.items()}
    return RunRecord(folder, config, config_text or "", version_texts, rows, evaluations, ending, problems)


def parsed(line: bytes) -> dict[str, Any] | None:
    """Parses a line of metrics.jsonl. Returns None for an incomplete or damaged one."""
    try:
        row = json.loads(line)
    except ValueError:  # no JSON, or no UTF-8
        return None
    whole = isinstance(row, dict) and isinstance(row.get("step"), int) and line.endswith(b"\n")
    return row if whole else None


def _text(path: Path, problems: list[str]) -> str | None:
    """Returns a file's text; None, with an entry in `problems`, where it can not be read."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = "is missing" if isinstance(error, FileNotFoundError) else f"can not be read ({error})"
        problems.append(f"{path.name} {why}.")
        return None


def _mapping(path: Path, read: Callable[[], object], text: str | None, problems: list[str]) -> dict[str, Any]:
    """Reads a mapping from YAML or JSON; {} for a missing file. What is wrong with it is appended to `problems`."""
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
    """Returns training steps and evaluations, by step. Of a step with several lines the last one counts."""
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        why = "is missing" if isinstance(error, FileNotFoundError) else f"can not be read ({error.strerror})"
        problems.append(f"{path.name} {why}, so there are no curves.")
        return [], []
    by_step: tuple[dict[int, Row], dict[int, Row]] = ({}, {})
    torn, odd = 0, 0
    for number, line in enumerate(lines):
        row = parsed(line)
        if row is None:
            torn += number + 1 < len(lines) or line.endswith(b"\n")  # the last one may be half written
            continue
        numbers = {n: float(v) for n, v in row.items() if isinstance(v, int | float) and not isinstance(v, bool)}
        odd += len(numbers) < len(row)
        held_out = any(name.startswith("evaluation/") for name in numbers)
        by_step[held_out][row["step"]] = numbers
    if torn:
        problems.append(f"{torn} of {len(lines)} lines of {path.name} are damaged and left out.")
    if odd:
        problems.append(f"{odd} lines of {path.name} hold something else than numbers, which is left out.")
    if not lines:
        problems.append(f"{path.name} is empty.")
    rows, evaluations = ([part[step] for step in sorted(part)] for part in by_step)
    return rows, evaluations


def _ending(
    folder: Path, rows: list[Row], evaluations: list[Row], config: dict[str, Any], problems: list[str]
) -> Ending:
    """Returns how a run ended, or that it is running, from its lock, its end file, its final weights and its
    metrics."""
    step = int(max((row["step"] for row in [*rows, *evaluations]), default=0))
    steps = config.get("steps")
    reached = f"step {step}" + (f" of {steps}" if isinstance(steps, int) else "")
    owner = _owner(folder / lock.NAME)
    who = f"process {owner.get('process')} on {owner.get('host')}, since {owner.get('since')}"
    if owner and lock.lives(owner):
        return Ending("running", f"It is running ({who}) and has logged {reached}.")
    if owner and owner.get("host") != lock.me()["host"]:
        ago = f", {duration_text(time.time() - rows[-1]['time'])} ago" if rows and "time" in rows[-1] else ""
        return Ending("unknown", f"It may be running on another host ({who}); the last it logged is {reached}{ago}.")
    end = _json(folder / END)
    if not end and (folder / END).exists():
        problems.append(f"{END} is damaged: how the run ended is read from what else there is.")
    if end:
        return Ending(str(end.get("state", "unknown")), str(end.get("sentence", "")))
    if ended := _json(folder / "final" / WEIGHTS):
        return Ending("finished", f"It reached its end at step {ended.get('step', step)}.")
    if owner:
        return Ending("killed", f"It was killed at {reached}: {who}, is gone and has not said how it ended.")
    if not rows and not evaluations:
        return Ending("empty", "It has not logged anything.")
    return Ending("unknown", f"It ended at {reached} without reaching its end, and has not said why.")


def _owner(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    with path.open() as file:
        owner = lock.named(file)
    return owner if isinstance(owner.get("process"), int) else {}


def _json(path: Path) -> dict[str, Any]:
    """Returns the mapping in a JSON file; empty where it is missing or damaged."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def flattened(tree: object, path: str = "") -> dict[str, Any]:
    """Returns the leaves of nested mappings by dotted keys. A list is a leaf unless it holds mappings."""
    if isinstance(tree, Mapping):
        inner = ((f"{path}.{key}" if path else str(key), value) for key, value in tree.items())
    elif isinstance(tree, list) and any(isinstance(item, Mapping) for item in tree):
        inner = ((f"{path}.{i}", value) for i, value in enumerate(tree))
    else:
        return {path: tree}
    return {key: value for prefix, item in inner for key, value in flattened(item, prefix).items()}

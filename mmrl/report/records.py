"""A run directory as it is found: what it logged, how it ended, and what of it can not be read."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from mmrl.errors import UserError
from mmrl.report import lock
from mmrl.runtime.progress import told_time

Row = dict[str, float]
END = "end.json"  # how a run ended, in its own words
WEIGHTS = "run.json"  # beside the weights that a run ended with: of which step they are


@dataclass(frozen=True)
class Series:
    """One metric over the steps in which it was logged. Values may be NaN or infinite, as they were logged."""

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
        """The finite values of the first quarter of the steps, at least one if there is any."""
        return self.finite[: max(1, len(self.finite) // 4)]

    @property
    def late(self) -> list[float]:
        """Those of the last quarter."""
        return self.finite[-max(1, len(self.finite) // 4) :]


@dataclass(frozen=True)
class Ending:
    """How a run ended. state: finished, running, stopped (by a signal), failed, killed, unknown or empty."""

    state: str
    sentence: str


@dataclass(frozen=True)
class RunRecord:
    """What a run directory holds. `rows` are training steps and `evaluations` evaluations, as in metrics.jsonl."""

    folder: Path
    config: dict[str, Any]
    config_text: str
    versions: dict[str, str]
    rows: list[Row]
    evaluations: list[Row]
    ending: Ending
    problems: list[str] = field(default_factory=list)  # what could not be read, a sentence each

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def step(self) -> int:
        """The last step that was logged; 0 where none was."""
        return int(max((row["step"] for row in [*self.rows, *self.evaluations]), default=0))

    @property
    def steps(self) -> int | None:
        """How many steps the configuration asks for."""
        steps = self.config.get("steps")
        return steps if isinstance(steps, int) else None

    @property
    def names(self) -> list[str]:
        """All metrics, in the order in which they first came."""
        found = {name: None for row in [*self.rows, *self.evaluations] for name in row}
        return [name for name in found if name not in ("step", "time")]

    def series(self, name: str) -> Series:
        """A metric of the training steps, or of the evaluations if its name begins with evaluation/ or is
        time/evaluation."""
        held_out = name.startswith("evaluation/") or name == "time/evaluation"
        rows = [row for row in (self.evaluations if held_out else self.rows) if name in row]
        return Series(name, [int(row["step"]) for row in rows], [row[name] for row in rows])

    def key(self, path: str, default: Any = None) -> Any:
        """What the configuration says at a dotted path."""
        found: Any = self.config
        for part in path.split("."):
            if not isinstance(found, dict) or part not in found:
                return default
            found = found[part]
        return found


def read_run(folder: str | Path) -> RunRecord:
    """The run in `folder`, whatever became of it. Raises UserError if there is no such folder."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder} is no run directory: there is no such folder")
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
    told = {str(name): str(version) for name, version in versions.items()}
    return RunRecord(folder, config, config_text or "", told, rows, evaluations, ending, problems)


def parsed(line: bytes) -> dict[str, Any] | None:
    """What a line of metrics.jsonl holds; None if it is not a whole one."""
    try:
        row = json.loads(line)
    except ValueError:  # no JSON, or no UTF-8
        return None
    whole = isinstance(row, dict) and isinstance(row.get("step"), int) and line.endswith(b"\n")
    return row if whole else None


def _text(path: Path, problems: list[str]) -> str | None:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = "is missing" if isinstance(error, FileNotFoundError) else f"can not be read ({error})"
        problems.append(f"{path.name} {why}.")
        return None


def _mapping(path: Path, read: Any, text: str | None, problems: list[str]) -> dict[str, Any]:
    if text is None:
        return {}
    if not text.strip():
        problems.append(f"{path.name} is empty.")
        return {}
    try:
        found = read()
    except (ValueError, yaml.YAMLError) as error:
        problems.append(f"{path.name} is damaged: {' '.join(str(error).split())[:200]}.")
        return {}
    if not isinstance(found, dict):
        problems.append(f"{path.name} is damaged: it holds no mapping.")
        return {}
    return found


def _metrics(path: Path, problems: list[str]) -> tuple[list[Row], list[Row]]:
    """Training steps and evaluations, by step; a step that stands there twice is taken as it was written last."""
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        why = "is missing" if isinstance(error, FileNotFoundError) else f"can not be read ({error.strerror})"
        problems.append(f"{path.name} {why}, so there are no curves.")
        return [], []
    found: tuple[dict[int, Row], dict[int, Row]] = ({}, {})
    torn, odd = 0, 0
    for number, line in enumerate(lines):
        row = parsed(line)
        if row is None:
            torn += number + 1 < len(lines) or line.endswith(b"\n")  # the last one may be in the making
            continue
        numbers = {n: float(v) for n, v in row.items() if isinstance(v, int | float) and not isinstance(v, bool)}
        odd += len(numbers) < len(row)
        held_out = any(name.startswith("evaluation/") for name in numbers)
        found[held_out][row["step"]] = numbers
    if torn:
        problems.append(f"{torn} of {len(lines)} lines of {path.name} are damaged and left out.")
    if odd:
        problems.append(f"{odd} lines of {path.name} hold something else than numbers, which is left out.")
    if not lines:
        problems.append(f"{path.name} is empty.")
    rows, evaluations = ([part[step] for step in sorted(part)] for part in found)
    return rows, evaluations


def _ending(
    folder: Path, rows: list[Row], evaluations: list[Row], config: dict[str, Any], problems: list[str]
) -> Ending:
    step = int(max((row["step"] for row in [*rows, *evaluations]), default=0))
    steps = config.get("steps")
    reached = f"step {step}" + (f" of {steps}" if isinstance(steps, int) else "")
    owner = _owner(folder / lock.NAME)
    who = f"process {owner.get('process')} on {owner.get('host')}, since {owner.get('since')}"
    if owner and lock.lives(owner):
        return Ending("running", f"It is running ({who}) and has logged {reached}.")
    if owner and owner.get("host") != lock.me()["host"]:
        ago = f", {told_time(time.time() - rows[-1]['time'])} ago" if rows and "time" in rows[-1] else ""
        return Ending("unknown", f"It may be running on another host ({who}); the last it logged is {reached}{ago}.")
    said = _json(folder / END)
    if not said and (folder / END).exists():
        problems.append(f"{END} is damaged: how the run ended is read from what else there is.")
    if said:
        return Ending(str(said.get("state", "unknown")), str(said.get("sentence", "")))
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
    """What a JSON file holds; nothing where it is missing or damaged."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def flattened(tree: Any, path: str = "") -> dict[str, Any]:
    """The leaves of nested mappings by their dotted keys; a list is a leaf unless it holds mappings."""
    if isinstance(tree, Mapping):
        inner = ((f"{path}.{key}" if path else str(key), value) for key, value in tree.items())
    elif isinstance(tree, list) and any(isinstance(item, Mapping) for item in tree):
        inner = ((f"{path}.{i}", value) for i, value in enumerate(tree))
    else:
        return {path: tree}
    return {key: value for place, item in inner for key, value in flattened(item, place).items()}

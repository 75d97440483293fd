"""Statistics of a data set's actions and states, from the files that OpenVLA, LeRobot and openpi write.

dataset_statistics.json, config.json   OpenVLA: {data set: {"action": {"q01", "q99", "mask"}, "proprio": {...}}}
meta/stats.json                        LeRobot: {"action": {"mean", "std", "min", "max", ...}, "observation.state": ...}
meta/episodes_stats.jsonl              LeRobot 2.1: the same for each episode
norm_stats.json                        openpi: {"norm_stats": {"actions": {"mean", "std", "q01", "q99"}, "state": ...}}
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mmrl.errors import UserError
from mmrl.policies.vla.heads.codec import ActionStatistics, StateQuantiles
from mmrl.policies.vla.settings import Actions

Kind = Literal["action", "state"]
Normalisation = Literal["quantiles", "min_max", "mean_std"]
Entry = Mapping[str, Any]  # statistics of one feature: "mean" to its numbers
BOUNDS: dict[Normalisation, tuple[str, str]] = {
    "quantiles": ("q01", "q99"),
    "min_max": ("min", "max"),
    "mean_std": ("mean", "std"),
}
NUMBERS = ("mean", "std", "min", "max", "q01", "q10", "q50", "q90", "q99")
NAMES: dict[Kind, tuple[str, ...]] = {
    "action": ("action", "actions"),
    "state": ("proprio", "observation.state", "state"),
}
FILES = (
    *("dataset_statistics.json", "norm_stats.json", "stats.json", "meta/stats.json"),
    *("episodes_stats.jsonl", "meta/episodes_stats.jsonl", "config.json"),
)
OWNER: dict[Kind, str] = {"action": "the robot takes", "state": "the simulator's state has"}
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DataSetStatistics:
    """Statistics of one data set. path: as the user wrote it; features: entries by their names in the file."""

    path: str
    name: str
    features: Mapping[str, Entry]

    def entry(self, kind: Kind) -> tuple[str, Entry]:
        """Returns the entry of actions or states and its name in messages. Raises UserError where there is none."""
        for name, entry in self.features.items():
            if ends_with(name, NAMES[kind]):
                return self._full(name), entry
        held = f"; it holds {', '.join(self.features) or 'nothing'}"
        if not self.name:
            raise UserError(f"{self.where} has no statistics of {kind}s ({' or '.join(NAMES[kind])}){held}")
        raise UserError(f"{self.where}: {self._full(NAMES[kind][0])}.q01 is missing{held}")

    def _full(self, name: str) -> str:
        return name if not self.name or name.startswith(f"{self.name}.") else f"{self.name}.{name}"

    @property
    def where(self) -> str:
        return f"action.statistics={self.path}"

    def numbers(self, kind: Kind, statistic: str, size: int) -> NDArray[np.float64]:
        """Returns one statistic, [size] finite numbers. Raises UserError naming what is missing or does not fit."""
        name, entry = self.entry(kind)
        if statistic not in entry:
            held = f"; it holds {', '.join(entry)}" if entry else ""
            raise UserError(f"{self.where}: {name}.{statistic} is missing{held}")
        self._check_length(f"{name}.{statistic}", entry[statistic], size, OWNER[kind])
        try:
            values = np.array(entry[statistic], float)
        except (TypeError, ValueError) as error:
            raise UserError(f"{self.where}: {name} must hold numbers: {error}") from None
        if values.shape != (size,):
            raise UserError(f"{self.where}: {name}.{statistic} must be a list of {size} numbers")
        return values

    def mask(self, kind: Kind, size: int) -> NDArray[np.bool_]:
        """Returns which numbers are scaled, [size]: all but those that OpenVLA's mask leaves out."""
        name, entry = self.entry(kind)
        mask = entry.get("mask", [True] * size)
        self._check_length(f"{name}.mask", mask, size, OWNER[kind])
        return np.array(mask, bool)

    def _check_length(self, name: str, values: object, size: int, whose: str) -> None:
        if not isinstance(values, list):
            raise UserError(f"{self.where}: {name} must be a list of numbers")
        if len(values) != size:
            raise UserError(f"{self.where}: {name} has {len(values)} numbers, {whose} {size}")


def ends_with(name: str, features: Sequence[str]) -> bool:
    """Returns whether a name is one of `features`, or one of a data set, as so100.buffer.action."""
    return any(name == feature or name.endswith(f".{feature}") for feature in features)


def statistics_of(action: Actions, action_dim: int) -> ActionStatistics | None:
    """Loads the statistics that `action` names for a policy without its own; None where it names none. Those that
    replace a checkpoint's are read with it. Raises UserError as `load_statistics`."""
    if action.statistics is None or action.replace_statistics:
        return None
    bounded = action.head.core.bounded
    return load_statistics(
        action.statistics, action.statistics_key, action_dim, bounded=bounded, normalisation=action.normalisation
    )


def load_statistics(
    path: str, key: str | None, action_dim: int, *, bounded: bool = True, normalisation: Normalisation | None = None
) -> ActionStatistics:
    """Reads what scales actions. normalisation: which numbers stand for -1 and 1; None: quantiles, or least and
    largest numbers where the file has no quantiles. Without a mask every number is scaled.

    Raises UserError naming the file and the key that is missing, unknown or of another length than `action_dim`, and
    for mean and deviation where actions are `bounded`.
    """
    data_set = read(path, key)
    chosen = normalisation or _normalisation(data_set, "action")
    if chosen == "mean_std" and bounded:
        raise UserError(
            "action.normalisation=mean_std: the head's actions lie in [-1, 1], one deviation around the mean; "
            "use quantiles or min_max"
        )
    low, high, mask = _range(data_set, "action", action_dim, chosen)
    return ActionStatistics(low, high, mask, bounded, clipped=chosen != "mean_std")


def load_state_quantiles(
    path: str, key: str | None, state_dim: int, normalisation: Normalisation | None = None
) -> StateQuantiles:
    """Reads what scales states from the same file. Raises UserError as `load_statistics`."""
    data_set = read(path, key)
    chosen = normalisation or _normalisation(data_set, "state")
    return StateQuantiles(*_range(data_set, "state", state_dim, chosen), clipped=chosen != "mean_std")


def read(path: str, key: str | None) -> DataSetStatistics:
    """Reads a file, or that of a folder. key: the data set, or the full name of its entry of actions. Raises UserError
    for another kind of file, and for an unknown or ambiguous data set."""
    data_sets = _data_sets(path)
    if key is None:
        if len(data_sets) != 1:
            raise UserError(
                f"action.statistics={path} holds {', '.join(data_sets)}; choose one with action.statistics_key"
            )
        return DataSetStatistics(path, *next(iter(data_sets.items())))
    matches = [name for name, features in data_sets.items() if key == name or key in features]
    matches = matches or [name for name in data_sets if name.startswith(f"{key}.")]
    if len(matches) != 1:
        held = ", ".join(name or ", ".join(features) for name, features in data_sets.items())
        raise UserError(f"action.statistics_key={key} is not in {path}; it holds {held}")
    return DataSetStatistics(path, matches[0], data_sets[matches[0]])


def _normalisation(data_set: DataSetStatistics, kind: Kind) -> Normalisation:
    """Returns the normalisation whose two numbers an entry has. Raises UserError where it has neither."""
    name, entry = data_set.entry(kind)
    if not {"q01", "q99"} & set(entry) and {"min", "max"} <= set(entry):
        log.info("%s: %s.min and max stand for -1 and 1, for it has no q01 and q99", data_set.where, name)
        return "min_max"
    if {"mean", "std"} <= set(entry) and not {"q01", "q99", "min", "max"} & set(entry):
        raise UserError(
            f"{data_set.where}: {name} holds {', '.join(entry)}; to scale into [-1, 1] it needs q01 and q99, or min "
            "and max (action.normalisation=mean_std is for heads whose actions are not bounded)"
        )
    return "quantiles"


def _range(
    data_set: DataSetStatistics, kind: Kind, size: int, normalisation: Normalisation
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_]]:
    """Returns the numbers that stand for -1 and 1, and the mask of scaled numbers, [size] each."""
    first, second = BOUNDS[normalisation]
    low, high = (data_set.numbers(kind, statistic, size) for statistic in (first, second))
    mask = data_set.mask(kind, size)
    name = data_set.entry(kind)[0]
    if normalisation == "mean_std":
        if not (np.isfinite(low) & np.isfinite(high) & (high >= 0))[mask].all():
            raise UserError(
                f"{data_set.where}: {name}.mean and std must be finite, std at least 0, got {low} and {high}"
            )
        low, high = low - high, low + high
    if not (np.isfinite(low) & np.isfinite(high) & (low <= high))[mask].all():
        raise UserError(f"{data_set.where}: {name}.{first} must be finite and at most {second}, got {low} and {high}")
    return low, high, mask


# --- files ---


def _data_sets(path: str) -> dict[str, dict[str, Entry]]:
    """Returns the entries of each data set of a file; the name of a file's only one may be empty."""
    file = _file(path)
    try:
        tree = _episodes(file) if file.suffix == ".jsonl" else json.loads(file.read_text())
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = str(error) if isinstance(error, OSError | ValueError) else f"{type(error).__name__} {error}"
        raise UserError(f"action.statistics={path}: {reason}") from None
    tree = tree.get("norm_stats", tree) if isinstance(tree, dict) else None
    if not isinstance(tree, dict) or not tree or not all(isinstance(value, dict) for value in tree.values()):
        raise UserError(
            f"action.statistics={path}: expected a mapping from data sets to statistics, in {file.name}, as OpenVLA's "
            "dataset_statistics.json, LeRobot's meta/stats.json or openpi's norm_stats.json"
        )
    if not any(set(NUMBERS) & set(value) for value in tree.values()):  # data sets, not features
        return {
            name: {n: entry for n, entry in features.items() if isinstance(entry, dict)}
            for name, features in tree.items()
        }
    grouped: dict[str, dict[str, Entry]] = {}
    for name, entry in tree.items():
        for feature in sorted((*NAMES["action"], *NAMES["state"]), key=len, reverse=True):
            if ends_with(name, [feature]):
                grouped.setdefault(name.removesuffix(feature).rstrip("."), {})[name] = entry
                break
    if not grouped:
        raise UserError(f"action.statistics={path} has no statistics of actions; it holds {', '.join(tree)}")
    return grouped


def _file(path: str) -> Path:
    """Returns the file itself, or that of a folder. Raises UserError for a folder that has none, or several."""
    folder = Path(path)
    if not folder.is_dir():
        return folder
    files = [folder / name for name in FILES if (folder / name).is_file()]
    files = files or sorted(folder.glob("assets/**/norm_stats.json"))[:2]
    if not files:
        raise UserError(f"action.statistics={path} is a folder without {', '.join(FILES)}; name the file")
    if len(files) > 1 and files[0].name == files[1].name == "norm_stats.json":
        raise UserError(f"action.statistics={path} holds {files[0]}, {files[1]} and perhaps more; name the file")
    return files[0]


def _episodes(file: Path) -> dict[str, Entry]:
    """Returns statistics of all frames from those of each episode."""
    episodes = [json.loads(line)["stats"] for line in file.read_text().splitlines() if line.strip()]
    names = [name for name in (episodes[0] if episodes else {}) if ends_with(name, (*NAMES["action"], *NAMES["state"]))]
    return {name: _pooled([episode[name] for episode in episodes]) for name in names}


def _pooled(entries: Sequence[Entry]) -> Entry:
    """Returns mean, deviation, least and largest numbers of parts together; weighted by their counts."""
    mean, std, least, largest = (np.array([e[name] for e in entries], float) for name in ("mean", "std", "min", "max"))
    count = np.array([e["count"] for e in entries], float).reshape(len(entries), 1)
    whole = (count * mean).sum(0) / count.sum()
    variance = (count * (std**2 + (mean - whole) ** 2)).sum(0) / count.sum()
    summary = {"mean": whole, "std": variance**0.5, "min": least.min(0), "max": largest.max(0)}
    return {name: values.tolist() for name, values in summary.items()}

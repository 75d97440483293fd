"""Reads statistics of a data set's actions and states from the files that OpenVLA, LeRobot and openpi write.

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

FeatureType = Literal["action", "state"]
Normalisation = Literal["quantiles", "min_max", "mean_std"]
Entry = Mapping[str, Any]  # statistics of one feature, by name such as "mean"
# The two statistics that each normalisation needs.
BOUNDS: dict[Normalisation, tuple[str, str]] = {
    "quantiles": ("q01", "q99"),
    "min_max": ("min", "max"),
    "mean_std": ("mean", "std"),
}
STATISTIC_NAMES = ("mean", "std", "min", "max", "q01", "q10", "q50", "q90", "q99")
FEATURE_NAMES: dict[FeatureType, tuple[str, ...]] = {
    "action": ("action", "actions"),
    "state": ("proprio", "observation.state", "state"),
}
FILES = (
    *("dataset_statistics.json", "norm_stats.json", "stats.json", "meta/stats.json"),
    *("episodes_stats.jsonl", "meta/episodes_stats.jsonl", "config.json"),
)
# Subject and verb of the message that an entry has the wrong length.
SIZE_SUBJECT: dict[FeatureType, str] = {"action": "the robot takes", "state": "the simulator's state has"}
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DataSetStatistics:
    """The statistics of one data set in a file."""

    path: str  # of the file or its folder, the value of action.statistics
    name: str  # of the data set; "" if the file does not name it
    features: Mapping[str, Entry]  # by their names in the file

    def entry(self, feature_type: FeatureType) -> tuple[str, Entry]:
        """Returns the name (for messages) and the entry of actions or states. Raises UserError if there is none."""
        for name, entry in self.features.items():
            if ends_with(name, FEATURE_NAMES[feature_type]):
                return self._full_name(name), entry
        held = f"; it holds {', '.join(self.features) or 'nothing'}"
        if not self.name:
            names = " or ".join(FEATURE_NAMES[feature_type])
            raise UserError(f"{self.where} has no statistics of {feature_type}s ({names}){held}")
        raise UserError(f"{self.where}: {self._full_name(FEATURE_NAMES[feature_type][0])} is missing{held}")

    def _full_name(self, name: str) -> str:
        """Returns the name of a feature with the name of its data set in front."""
        return name if not self.name or name.startswith(f"{self.name}.") else f"{self.name}.{name}"

    @property
    def where(self) -> str:
        """The beginning of messages: the option and its value."""
        return f"action.statistics={self.path}"

    def numbers(self, feature_type: FeatureType, statistic: str, size: int) -> NDArray[np.float64]:
        """Returns one statistic of actions or states as [size] numbers. Raises UserError if it is missing, is not a
        list of numbers or has another length."""
        name, entry = self.entry(feature_type)
        if statistic not in entry:
            held = f"; it holds {', '.join(entry)}" if entry else ""
            raise UserError(f"{self.where}: {name}.{statistic} is missing{held}")
        self._check_length(f"{name}.{statistic}", entry[statistic], size, SIZE_SUBJECT[feature_type])
        try:
            values = np.array(entry[statistic], float)
        except (TypeError, ValueError) as error:
            raise UserError(f"{self.where}: {name}.{statistic} must hold numbers: {error}") from None
        if values.shape != (size,):
            shape = list(values.shape)
            raise UserError(f"{self.where}: {name}.{statistic} must be a list of {size} numbers, but has shape {shape}")
        return values

    def mask(self, feature_type: FeatureType, size: int) -> NDArray[np.bool_]:
        """Returns which numbers are normalised, [size] bool: the entry's "mask", which OpenVLA writes, or all if it has
        none."""
        name, entry = self.entry(feature_type)
        mask = entry.get("mask", [True] * size)
        self._check_length(f"{name}.mask", mask, size, SIZE_SUBJECT[feature_type])
        return np.array(mask, bool)

    def _check_length(self, name: str, values: object, size: int, size_subject: str) -> None:
        """Raises UserError if `values` is not a list of length `size`. size_subject: see `SIZE_SUBJECT`."""
        if not isinstance(values, list):
            raise UserError(f"{self.where}: {name} must be a list of numbers, not {type(values).__name__}")
        if len(values) != size:
            raise UserError(
                f"{self.where}: {name} has {len(values)} numbers, but {size_subject} {size}; use statistics of this "
                "robot"
            )


def ends_with(name: str, features: Sequence[str]) -> bool:
    """Returns whether a name is one of `features`, alone or after a data set's name, as in so100.buffer.action."""
    return any(name == feature or name.endswith(f".{feature}") for feature in features)


def load_action_statistics(action: Actions, action_dim: int) -> ActionStatistics | None:
    """Loads the statistics that action.statistics names. Returns None if it is not set, and with
    action.replace_statistics, since a LeRobot checkpoint's processors then load them. Raises UserError as
    `load_statistics`."""
    if action.statistics is None or action.replace_statistics:
        return None
    bounded = action.head.checkpoint_head.bounded
    return load_statistics(
        action.statistics, action.statistics_key, action_dim, bounded=bounded, normalisation=action.normalisation
    )


def load_statistics(
    path: str, key: str | None, action_dim: int, *, bounded: bool = True, normalisation: Normalisation | None = None
) -> ActionStatistics:
    """Reads the statistics that normalise actions.

    path, key: see `read`. bounded: whether the policy's actions are clipped to [-1, 1]. normalisation: which statistics
    are mapped to -1 and 1; None: quantiles, or min and max if the file has no quantiles.

    Raises UserError if a statistic is missing, unknown or not of length `action_dim`, and for mean_std if actions are
    `bounded`.
    """
    data_set = read(path, key)
    normalisation = normalisation or _default_normalisation(data_set, "action")
    if normalisation == "mean_std" and bounded:
        raise UserError(
            "action.normalisation=mean_std: the head's actions lie in [-1, 1], which would be one standard deviation "
            "around the mean; use quantiles or min_max"
        )
    low, high, mask = _range(data_set, "action", action_dim, normalisation)
    return ActionStatistics(low, high, mask, bounded, clipped=normalisation != "mean_std")


def load_state_quantiles(
    path: str, key: str | None, state_dim: int, normalisation: Normalisation | None = None
) -> StateQuantiles:
    """Reads the statistics that normalise states. Arguments and errors are those of `load_statistics`."""
    data_set = read(path, key)
    normalisation = normalisation or _default_normalisation(data_set, "state")
    low, high, mask = _range(data_set, "state", state_dim, normalisation)
    return StateQuantiles(low, high, mask, clipped=normalisation != "mean_std")


def read(path: str, key: str | None) -> DataSetStatistics:
    """Reads the statistics of one data set. path: a file, or a folder with one; key: the data set's name, or the full
    name of its entry of actions; None if the file has one data set only.

    Raises UserError for a file of another format, and for an unknown or ambiguous data set."""
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
        raise UserError(f"action.statistics_key={key} does not name one data set of {path}; it holds {held}")
    return DataSetStatistics(path, matches[0], data_sets[matches[0]])


def _default_normalisation(data_set: DataSetStatistics, feature_type: FeatureType) -> Normalisation:
    """Returns "quantiles", or "min_max" if the entry has no quantiles. Raises UserError if it has mean and std only."""
    name, entry = data_set.entry(feature_type)
    if not {"q01", "q99"} & set(entry) and {"min", "max"} <= set(entry):
        log.info("%s: %s has no q01 and q99; its min and max are mapped to -1 and 1", data_set.where, name)
        return "min_max"
    if {"mean", "std"} <= set(entry) and not {"q01", "q99", "min", "max"} & set(entry):
        raise UserError(
            f"{data_set.where}: {name} holds {', '.join(entry)}; to scale into [-1, 1] it needs q01 and q99, or min "
            "and max (action.normalisation=mean_std is for heads whose actions are not bounded)"
        )
    return "quantiles"


def _range(
    data_set: DataSetStatistics, feature_type: FeatureType, size: int, normalisation: Normalisation
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_]]:
    """Returns the values that are mapped to -1 and to 1, and the mask of normalised numbers, [size] each. Raises
    UserError if a value is not finite, or if the first is above the second."""
    first, second = BOUNDS[normalisation]
    low, high = (data_set.numbers(feature_type, statistic, size) for statistic in (first, second))
    mask = data_set.mask(feature_type, size)
    name = data_set.entry(feature_type)[0]
    if normalisation == "mean_std":
        mean, std = low, high
        if not (np.isfinite(mean) & np.isfinite(std) & (std >= 0))[mask].all():
            raise UserError(
                f"{data_set.where}: {name}.mean and std must be finite, std at least 0, got {mean} and {std}"
            )
        low, high = mean - std, mean + std
    if not (np.isfinite(low) & np.isfinite(high) & (low <= high))[mask].all():
        raise UserError(f"{data_set.where}: {name}.{first} must be finite and at most {second}, got {low} and {high}")
    return low, high, mask


# --- files ---


def _data_sets(path: str) -> dict[str, dict[str, Entry]]:
    """Returns the features of each data set in a file, by the data set's name, "" if the file does not name it. path: a
    file or a folder. Raises UserError for a file that cannot be read, or holds no statistics of actions or states."""
    file = _find_file(path)
    try:
        tree = _pool_episodes(file) if file.suffix == ".jsonl" else json.loads(file.read_text())
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = str(error) if isinstance(error, OSError | ValueError) else f"{type(error).__name__} {error}"
        raise UserError(f"action.statistics={path}: {reason}") from None
    tree = tree.get("norm_stats", tree) if isinstance(tree, dict) else None
    if not isinstance(tree, dict) or not tree or not all(isinstance(value, dict) for value in tree.values()):
        raise UserError(
            f"action.statistics={path}: {file.name} holds no mapping from data sets to statistics; name a file such as "
            "OpenVLA's dataset_statistics.json, LeRobot's meta/stats.json or openpi's norm_stats.json"
        )
    if not any(set(STATISTIC_NAMES) & set(value) for value in tree.values()):  # data sets, not features
        return {
            name: {n: entry for n, entry in features.items() if isinstance(entry, dict)}
            for name, features in tree.items()
        }
    grouped: dict[str, dict[str, Entry]] = {}
    for name, entry in tree.items():
        # the longest name first, since "observation.state" also ends with ".state"
        for feature in sorted((*FEATURE_NAMES["action"], *FEATURE_NAMES["state"]), key=len, reverse=True):
            if ends_with(name, [feature]):
                grouped.setdefault(name.removesuffix(feature).rstrip("."), {})[name] = entry
                break
    if not grouped:
        raise UserError(
            f"action.statistics={path} has no statistics of actions ({' or '.join(FEATURE_NAMES['action'])}); it holds "
            f"{', '.join(tree)}"
        )
    return grouped


def _find_file(path: str) -> Path:
    """Returns `path`, or the file of statistics in it if it is a folder. Raises UserError if the folder has no such
    file, or several."""
    folder = Path(path)
    if not folder.is_dir():
        return folder
    files = [folder / name for name in FILES if (folder / name).is_file()]
    files = files or sorted(folder.glob("assets/**/norm_stats.json"))[:2]
    if not files:
        raise UserError(f"action.statistics={path} is a folder without {', '.join(FILES)}; name the file")
    # of several files with names in FILES the first one counts
    if len(files) > 1 and files[0].name == files[1].name == "norm_stats.json":
        raise UserError(f"action.statistics={path} holds {files[0]}, {files[1]} and perhaps more; name the file")
    return files[0]


def _pool_episodes(file: Path) -> dict[str, Entry]:
    """Computes the statistics of all frames, by feature, from a JSON lines file with the statistics of each episode."""
    episodes = [json.loads(line)["stats"] for line in file.read_text().splitlines() if line.strip()]
    names = [
        name
        for name in (episodes[0] if episodes else {})
        if ends_with(name, (*FEATURE_NAMES["action"], *FEATURE_NAMES["state"]))
    ]
    return {name: _pool([episode[name] for episode in episodes]) for name in names}


def _pool(entries: Sequence[Entry]) -> Entry:
    """Combines mean, std, min and max of the episodes, weighted by their numbers of frames."""
    means, stds, minima, maxima = (
        np.array([e[name] for e in entries], float) for name in ("mean", "std", "min", "max")
    )
    count = np.array([e["count"] for e in entries], float).reshape(len(entries), 1)
    mean = (count * means).sum(0) / count.sum()
    # the variance inside episodes plus that of their means
    variance = (count * (stds**2 + (means - mean) ** 2)).sum(0) / count.sum()
    summary = {"mean": mean, "std": variance**0.5, "min": minima.min(0), "max": maxima.max(0)}
    return {name: values.tolist() for name, values in summary.items()}

"""Statistics in the processor files of a LeRobot policy, which LeRobot leaves unused where it does not find them under
the names "action" and "observation.state".

policy_preprocessor.json     {"steps": [{"registry_name": "normalizer_processor", "config": {"features", "norm_map"},
                             "state_file": NAME.safetensors}, ...]}; the file holds the mean of "action" and the like
policy_postprocessor.json    the same with "unnormalizer_processor"
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from mmrl.errors import UserError
from mmrl.policies.vla.settings import Actions
from mmrl.policies.vla.statistics import NUMBERS, DataSetStatistics, Kind, ends_with, read

CONFIG = "config.json"
PREPROCESSOR, POSTPROCESSOR = "policy_preprocessor", "policy_postprocessor"
FILES = (CONFIG, f"{PREPROCESSOR}*", f"{POSTPROCESSOR}*")  # files that a saved policy copies unchanged
STEPS = {PREPROCESSOR: "normalizer_processor", POSTPROCESSOR: "unnormalizer_processor"}
FEATURES: dict[Kind, str] = {"state": "observation.state", "action": "action"}
READ: dict[str, tuple[Kind, ...]] = {PREPROCESSOR: ("state", "action"), POSTPROCESSOR: ("action",)}
MODES = {  # two statistics of each of LeRobot's modes
    "MEAN_STD": ("mean", "std"),
    "MIN_MAX": ("min", "max"),
    "QUANTILES": ("q01", "q99"),
    "QUANTILE10": ("q10", "q90"),
}
IDENTITY = "IDENTITY"
Statistics = dict[str, Tensor]  # "mean" to its numbers
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Still:
    """Numbers that never moved in the data, [number]: LeRobot divides by 1e-8 where they move after all. mask: which;
    values: theirs."""

    mask: Tensor
    values: Tensor

    def shown(self, numbers: Tensor) -> Tensor:
        """Returns numbers [..., number] with those that never moved at their values of the data."""
        return torch.where(self.mask, self.values, numbers)

    def left(self, numbers: NDArray) -> NDArray[np.bool_]:
        """Returns which numbers [..., number] are not where the data have them."""
        values = self.values.double().numpy()
        return self.mask.numpy() & (np.abs(numbers - values) > 1e-4 * np.maximum(1, np.abs(values)))


@dataclass(frozen=True)
class ProcessorFiles:
    """The files of a policy apart from its weights, by name, and the numbers that never moved; None where a feature is
    not normalised."""

    contents: dict[str, bytes]
    still: Mapping[Kind, Still | None]

    def write(self, folder: Path) -> None:
        for name, content in self.contents.items():
            (folder / name).write_bytes(content)


class Normaliser:
    """The step of a processor that normalises, and the statistics in its file."""

    def __init__(self, path: str, processor: str, contents: Mapping[str, bytes]) -> None:
        self.path, self.file, self.step_name = path, f"{processor}.json", STEPS[processor]
        steps: list[dict[str, Any]] = json.loads(contents[self.file])["steps"]
        step = next((step for step in steps if step.get("registry_name") == self.step_name), None)
        if step is None:
            raise UserError(f"{self.where} has no step {self.step_name}, so that its numbers would be no robot's")
        self.modes: dict[str, str] = step["config"].get("norm_map", {})
        self.features: dict[str, Any] = step["config"].get("features", {})
        self.state_file: str | None = step.get("state_file")
        self.tensors: Statistics = {}
        if self.state_file is not None:
            if self.state_file not in contents:
                raise UserError(f"{self.where} names {self.state_file}, which is missing")
            try:
                self.tensors = load(contents[self.state_file])
            except SafetensorError as error:
                raise UserError(f"model.path={path}: {self.state_file}: {error}") from None

    @property
    def where(self) -> str:
        return f"model.path={self.path}: {self.file}"

    def needed(self, kind: Kind) -> tuple[str, ...]:
        """Returns the statistics that the mode of actions or states reads; none where they are not normalised."""
        mode = self.modes.get(kind.upper(), IDENTITY)
        if mode == IDENTITY:
            return ()
        if mode not in MODES:
            raise UserError(f"{self.where} normalises {kind}s by {mode}; known are {', '.join((*MODES, IDENTITY))}")
        if FEATURES[kind] not in self.features:
            raise UserError(
                f"{self.where} normalises {', '.join(self.features) or 'nothing'}, not {FEATURES[kind]}, which LeRobot "
                "would leave as it is"
            )
        return MODES[mode]

    def size(self, kind: Kind) -> int:
        return int(np.prod(self.features[FEATURES[kind]]["shape"]))

    def named(self, kind: Kind, key: str | None) -> Statistics:
        """Returns the checkpoint's own statistics of actions or states, which may stand under the name of a data set.
        Raises UserError where there are none, or several and `key` does not choose."""
        feature, needed = FEATURES[kind], self.needed(kind)
        entries: dict[str, Statistics] = {}
        for name, tensor in self.tensors.items():
            entry, _, statistic = name.rpartition(".")
            entries.setdefault(entry, {})[statistic] = tensor
        fit = [name for name, entry in entries.items() if ends_with(name, [feature]) and set(needed) <= set(entry)]
        if not fit:
            raise UserError(
                f"{self.where} has no {' and '.join(needed)} of {feature}, without which LeRobot would leave its "
                f"numbers as they are; it holds {', '.join(sorted(self.tensors)) or 'nothing'}. Set action.statistics "
                "to those of your data (its folder or meta/stats.json) and action.replace_statistics=true"
            )
        groups = {name: name.removesuffix(feature).rstrip(".") for name in fit}
        if key is not None:
            chosen = [name for name, group in groups.items() if key in (name, group)]
            chosen = chosen or [name for name, group in groups.items() if group.startswith(f"{key}.")]
            if len(chosen) != 1:
                raise UserError(
                    f"{self.where} has no action.statistics_key={key} of {feature}; it has {', '.join(fit)}"
                )
            return entries[chosen[0]]
        if feature in fit:
            return entries[feature]
        if len(fit) > 1:
            raise UserError(
                f"{self.where} has statistics of several data sets: {', '.join(groups.values())}; choose with "
                "action.statistics_key, or set action.statistics and action.replace_statistics=true"
            )
        log.info("%s: the statistics of %s are those of %s", self.where, feature, fit[0])
        return entries[fit[0]]

    def replaced(self, kind: Kind, data_set: DataSetStatistics) -> Statistics:
        """Returns the statistics of a data set for actions or states. Raises UserError where the mode's are missing."""
        size = self.size(kind)
        if not data_set.mask(kind, size).all():
            raise UserError(
                f"{data_set.where}: the mask of {data_set.entry(kind)[0]} leaves numbers as they are, which LeRobot's "
                "processors cannot"
            )
        needed, (_, entry) = self.needed(kind), data_set.entry(kind)
        names = [*needed, *(name for name in NUMBERS if name in entry and name not in needed)]
        numbers = {name: data_set.numbers(kind, name, size) for name in names}
        return {name: torch.from_numpy(values.astype(np.float32)) for name, values in numbers.items()}

    def check(self, kind: Kind, statistics: Statistics) -> Still:
        """Returns which numbers never moved. Raises UserError for statistics that are not finite or have no range."""
        first, second = (statistics[name].float() for name in self.needed(kind))
        if not (first.isfinite() & second.isfinite()).all():
            raise UserError(f"{self.where}: the statistics of {FEATURES[kind]} are not finite; mend or replace them")
        centred = self.needed(kind) == MODES["MEAN_STD"]
        span = second if centred else second - first
        if (span < 0).any():
            number = int((span < 0).nonzero()[0])
            raise UserError(f"{self.where}: number {number} of {FEATURES[kind]} has a range below 0; mend it")
        return Still(span == 0, first)


def prepared(path: str, folder: Path, action: Actions) -> ProcessorFiles:
    """Reads the processor files in `folder` and gives statistics the names under which LeRobot finds them; those of
    action.statistics in their place where action.replace_statistics asks for it.

    Raises UserError naming the statistics that are missing or ambiguous, for LeRobot would leave numbers as they are.
    """
    contents = {file.name: file.read_bytes() for pattern in FILES for file in sorted(folder.glob(pattern))}
    data_set = _replacing(path, action)
    still: dict[Kind, Still | None] = {"state": None, "action": None}
    for processor in (PREPROCESSOR, POSTPROCESSOR):
        normaliser = Normaliser(path, processor, contents)
        kinds = [kind for kind in READ[processor] if normaliser.needed(kind)]
        statistics_of = {kind: _read(normaliser, kind, data_set, action) for kind in kinds}
        for kind, statistics in statistics_of.items():
            still[kind] = still[kind] or normaliser.check(kind, statistics)
        if changed := _renamed(normaliser, statistics_of):
            contents |= _written(contents, normaliser, changed)
    for kind, one in still.items():
        if one is not None and one.mask.any():
            numbers = one.mask.flatten().nonzero().flatten().tolist()
            log.warning("model.path=%s: %s %s never moved in its data and stays there", path, FEATURES[kind], numbers)
    return ProcessorFiles(contents, still)


def _replacing(path: str, action: Actions) -> DataSetStatistics | None:
    """Reads the statistics that replace the checkpoint's. Raises UserError for options that do not go together."""
    if action.normalisation is not None:
        raise UserError(
            f"action.normalisation={action.normalisation}, but the processors of model.path={path} have modes of their "
            "own; remove it"
        )
    if action.replace_statistics:
        if action.statistics is None:
            raise UserError("action.replace_statistics=true needs action.statistics, which is not set")
        return read(action.statistics, action.statistics_key)
    if action.statistics is not None:
        raise UserError(
            f"action.statistics is set, but model.path={path} has files of statistics of its own; remove "
            "it, or set action.replace_statistics=true"
        )
    return None


def _read(normaliser: Normaliser, kind: Kind, data_set: DataSetStatistics | None, action: Actions) -> Statistics:
    if data_set is None:
        return normaliser.named(kind, action.statistics_key)
    return normaliser.replaced(kind, data_set)


def _renamed(normaliser: Normaliser, statistics_of: Mapping[Kind, Statistics]) -> Statistics | None:
    """Returns all tensors of a file, those statistics under LeRobot's names; None if they stand so already."""
    names = {f"{FEATURES[kind]}.{name}": tensor for kind, one in statistics_of.items() for name, tensor in one.items()}
    if all(name in normaliser.tensors and torch.equal(normaliser.tensors[name], names[name]) for name in names):
        return None
    features = [FEATURES[kind] for kind in statistics_of]
    others = {name: t for name, t in normaliser.tensors.items() if not ends_with(name.rpartition(".")[0], features)}
    return {name: tensor.contiguous().clone() for name, tensor in (others | names).items()}


def _written(contents: Mapping[str, bytes], normaliser: Normaliser, tensors: Statistics) -> dict[str, bytes]:
    """Returns the changed files of a processor."""
    if normaliser.state_file is not None:
        return {normaliser.state_file: save(tensors)}
    tree = json.loads(contents[normaliser.file])
    name = f"{normaliser.file.removesuffix('.json')}_{normaliser.step_name}.safetensors"
    for step in tree["steps"]:
        if step.get("registry_name") == normaliser.step_name:
            step["state_file"] = name
    return {normaliser.file: json.dumps(tree, indent=2).encode(), name: save(tensors)}

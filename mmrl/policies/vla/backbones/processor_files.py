"""Reads the processor files of a LeRobot policy, and repairs the names of the statistics inside.

LeRobot skips the normalisation, without an error, if the statistics do not have the names "action" and
"observation.state".

policy_preprocessor.json     {"steps": [{"registry_name": "normalizer_processor", "config": {"features", "norm_map"},
                             "state_file": NAME.safetensors}, ...]}; the file holds tensors such as "action.mean"
policy_postprocessor.json    as policy_preprocessor.json, but with "unnormalizer_processor"
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
from mmrl.policies.vla.statistics import STATISTIC_NAMES, DataSetStatistics, FeatureType, ends_with, read

CONFIG = "config.json"
PREPROCESSOR, POSTPROCESSOR = "policy_preprocessor", "policy_postprocessor"
FILES = (CONFIG, f"{PREPROCESSOR}*", f"{POSTPROCESSOR}*")  # files that a saved policy copies unchanged
# Registry name of the step that normalises, and the features that it normalises, in each processor.
STEPS = {PREPROCESSOR: "normalizer_processor", POSTPROCESSOR: "unnormalizer_processor"}
FEATURES: dict[FeatureType, str] = {"state": "observation.state", "action": "action"}
NORMALISED: dict[str, tuple[FeatureType, ...]] = {PREPROCESSOR: ("state", "action"), POSTPROCESSOR: ("action",)}
MODES = {  # LeRobot's normalisation modes, and the two statistics that each needs
    "MEAN_STD": ("mean", "std"),
    "MIN_MAX": ("min", "max"),
    "QUANTILES": ("q01", "q99"),
    "QUANTILE10": ("q10", "q90"),
}
IDENTITY = "IDENTITY"
Statistics = dict[str, Tensor]  # of one feature, by name such as "mean"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ConstantValues:
    """Numbers of a state or an action that are constant in the data. Their range is 0, so LeRobot would divide other
    values by 1e-8."""

    mask: Tensor  # [number] bool, which numbers are constant
    values: Tensor  # [number], their values in the data

    def fill(self, numbers: Tensor) -> Tensor:
        """Returns numbers [..., number] with the constant ones set to their values in the data."""
        return torch.where(self.mask, self.values, numbers)

    def moved(self, numbers: NDArray) -> NDArray[np.bool_]:
        """Returns which numbers [..., number] should be constant but differ from their values in the data."""
        values = self.values.double().numpy()
        return self.mask.numpy() & (np.abs(numbers - values) > 1e-4 * np.maximum(1, np.abs(values)))


@dataclass(frozen=True)
class ProcessorFiles:
    """The files of a LeRobot policy except its weights."""

    contents: dict[str, bytes]  # by name
    constants: Mapping[FeatureType, ConstantValues | None]  # None: the feature is not normalised

    def write(self, folder: Path) -> None:
        """Writes the files into `folder`."""
        for name, content in self.contents.items():
            (folder / name).write_bytes(content)


class Normaliser:
    """The normalisation step of a processor, and the statistics that its file holds."""

    def __init__(self, path: str, processor: str, contents: Mapping[str, bytes]) -> None:
        """path: model.path, for messages. processor: PREPROCESSOR or POSTPROCESSOR. contents: the contents of the
        policy's files, by name. Raises UserError if the processor has no normalisation step, or the file of its
        statistics cannot be read."""
        self.path, self.file, self.step_name = path, f"{processor}.json", STEPS[processor]
        steps: list[dict[str, Any]] = json.loads(contents[self.file])["steps"]
        step = next((step for step in steps if step.get("registry_name") == self.step_name), None)
        if step is None:
            raise UserError(
                f"{self.where} has no step {self.step_name}, which converts to the robot's units; save the policy "
                "again with LeRobot"
            )
        self.modes: dict[str, str] = step["config"].get("norm_map", {})
        self.features: dict[str, Any] = step["config"].get("features", {})
        self.state_file: str | None = step.get("state_file")
        self.tensors: Statistics = {}
        if self.state_file is not None:
            if self.state_file not in contents:
                raise UserError(f"{self.where} names {self.state_file}, which is missing; copy the whole folder")
            try:
                self.tensors = load(contents[self.state_file])
            except SafetensorError as error:
                raise UserError(
                    f"model.path={path}: {self.state_file} cannot be read: {error}; copy it again"
                ) from None

    @property
    def where(self) -> str:
        """The beginning of messages: the model and the processor's file."""
        return f"model.path={self.path}: {self.file}"

    def required_statistics(self, feature_type: FeatureType) -> tuple[str, ...]:
        """Returns the names of the statistics that normalise actions or states; () if they are not normalised."""
        mode = self.modes.get(feature_type.upper(), IDENTITY)
        if mode == IDENTITY:
            return ()
        if mode not in MODES:
            raise UserError(
                f"{self.where} normalises {feature_type}s by {mode}, which is not supported; use a policy with one of "
                f"{', '.join((*MODES, IDENTITY))}"
            )
        if FEATURES[feature_type] not in self.features:
            raise UserError(
                f"{self.where} names a mode for {FEATURES[feature_type]} but lists only "
                f"{', '.join(self.features) or 'nothing'} as features, so LeRobot would not normalise it; add it to "
                "`features`"
            )
        return MODES[mode]

    def size(self, feature_type: FeatureType) -> int:
        """Returns the number of numbers in an action or a state."""
        return int(np.prod(self.features[FEATURES[feature_type]]["shape"]))

    def own_statistics(self, feature_type: FeatureType, key: str | None) -> Statistics:
        """Returns the checkpoint's statistics of actions or states. Their names in the file may begin with the name of
        a data set.

        key: action.statistics_key, the name of the data set to choose. Raises UserError if there are no statistics, and
        if there are several data sets but `key` does not choose one."""
        feature, required = FEATURES[feature_type], self.required_statistics(feature_type)
        entries: dict[str, Statistics] = {}
        for name, tensor in self.tensors.items():
            entry, _, statistic = name.rpartition(".")
            entries.setdefault(entry, {})[statistic] = tensor
        candidates = [n for n, entry in entries.items() if ends_with(n, [feature]) and set(required) <= set(entry)]
        if not candidates:
            raise UserError(
                f"{self.where} has no {' and '.join(required)} of {feature}; LeRobot needs them to normalise its "
                f"numbers; it holds {', '.join(sorted(self.tensors)) or 'nothing'}. Set action.statistics "
                "to those of your data (its folder or meta/stats.json) and action.replace_statistics=true"
            )
        data_sets = {name: name.removesuffix(feature).rstrip(".") for name in candidates}
        if key is not None:
            matches = [name for name, data_set in data_sets.items() if key in (name, data_set)]
            matches = matches or [name for name, data_set in data_sets.items() if data_set.startswith(f"{key}.")]
            if len(matches) != 1:
                raise UserError(
                    f"{self.where}: action.statistics_key={key} does not select one entry of {feature}; it has "
                    f"{', '.join(candidates)}"
                )
            return entries[matches[0]]
        if feature in candidates:
            return entries[feature]
        if len(candidates) > 1:
            raise UserError(
                f"{self.where} has statistics of several data sets: {', '.join(data_sets.values())}; choose with "
                "action.statistics_key, or set action.statistics and action.replace_statistics=true"
            )
        log.info("%s: the statistics of %s are those of %s", self.where, feature, candidates[0])
        return entries[candidates[0]]

    def statistics_from(self, data_set: DataSetStatistics, feature_type: FeatureType) -> Statistics:
        """Converts a data set's statistics of actions or states to tensors by name. Raises UserError if a required
        statistic is missing, and if the data set's mask excludes numbers from normalisation."""
        size = self.size(feature_type)
        if not data_set.mask(feature_type, size).all():
            raise UserError(
                f"{data_set.where}: the mask of {data_set.entry(feature_type)[0]} excludes numbers from normalisation, "
                "which LeRobot's processors cannot do; use statistics without a mask"
            )
        required, (_, entry) = self.required_statistics(feature_type), data_set.entry(feature_type)
        names = [*required, *(name for name in STATISTIC_NAMES if name in entry and name not in required)]
        numbers = {name: data_set.numbers(feature_type, name, size) for name in names}
        return {name: torch.from_numpy(values.astype(np.float32)) for name, values in numbers.items()}

    def find_constants(self, feature_type: FeatureType, statistics: Statistics) -> ConstantValues:
        """Returns the numbers that are constant in the data. Raises UserError for statistics that are not finite, and
        for a negative range or standard deviation."""
        first, second = (statistics[name].float() for name in self.required_statistics(feature_type))
        if not (first.isfinite() & second.isfinite()).all():
            raise UserError(
                f"{self.where}: the statistics of {FEATURES[feature_type]} are not finite; correct them, or set "
                "action.statistics and action.replace_statistics=true"
            )
        is_mean_std = self.required_statistics(feature_type) == MODES["MEAN_STD"]
        span = second if is_mean_std else second - first
        if (span < 0).any():
            number = int((span < 0).nonzero()[0])
            raise UserError(
                f"{self.where}: number {number} of {FEATURES[feature_type]} has a negative "
                f"{'std' if is_mean_std else 'range'} ({float(span[number]):.4g}); correct it, or set "
                "action.statistics and action.replace_statistics=true"
            )
        return ConstantValues(span == 0, first)  # first: mean or lower end, equal to the values where the range is 0


def load_processor_files(path: str, folder: Path, action: Actions) -> ProcessorFiles:
    """Reads the processor files in `folder`, and gives statistics the names under which LeRobot finds them. With
    action.replace_statistics, the statistics in action.statistics replace the checkpoint's. Also returns which numbers
    of state and action are constant in the statistics, and warns of them.

    path: model.path, for messages. Raises UserError if statistics are missing or ambiguous.
    """
    contents = {file.name: file.read_bytes() for pattern in FILES for file in sorted(folder.glob(pattern))}
    replacement = _replacement_statistics(path, action)
    constants: dict[FeatureType, ConstantValues | None] = {"state": None, "action": None}
    for processor in (PREPROCESSOR, POSTPROCESSOR):
        normaliser = Normaliser(path, processor, contents)
        statistics_of: dict[FeatureType, Statistics] = {}
        for feature_type in NORMALISED[processor]:
            if normaliser.required_statistics(feature_type):
                statistics = _load_statistics(normaliser, feature_type, replacement, action)
                statistics_of[feature_type] = statistics
                # of the first processor with statistics of this feature
                constants[feature_type] = constants[feature_type] or normaliser.find_constants(feature_type, statistics)
        if changed := _with_lerobot_names(normaliser, statistics_of):
            contents |= _changed_files(contents, normaliser, changed)
    for feature_type, values in constants.items():
        if values is not None and values.mask.any():
            numbers = values.mask.flatten().nonzero().flatten().tolist()
            log.warning(
                "model.path=%s: numbers %s of %s are constant in the policy's statistics, so %s",
                path,
                numbers,
                FEATURES[feature_type],
                "these numbers of an action are always those constants"
                if feature_type == "action"
                else "the policy does not see them change",
            )
    return ProcessorFiles(contents, constants)


def _replacement_statistics(path: str, action: Actions) -> DataSetStatistics | None:
    """Reads the statistics that replace the checkpoint's; None without action.replace_statistics. Raises UserError for
    options that do not fit together."""
    if action.normalisation is not None:
        raise UserError(
            f"action.normalisation={action.normalisation}, but the processors of model.path={path} have modes of their "
            "own; remove that key"
        )
    if action.replace_statistics:
        if action.statistics is None:
            raise UserError(
                "action.replace_statistics=true needs action.statistics; set it to the data set's file of statistics"
            )
        return read(action.statistics, action.statistics_key)
    if action.statistics is not None:
        raise UserError(
            f"action.statistics is set, but model.path={path} has statistics of its own; remove that key, or set "
            "action.replace_statistics=true"
        )
    return None


def _load_statistics(
    normaliser: Normaliser, feature_type: FeatureType, data_set: DataSetStatistics | None, action: Actions
) -> Statistics:
    """Returns the statistics of actions or states from `data_set`, or, if that is None, from the checkpoint."""
    if data_set is None:
        return normaliser.own_statistics(feature_type, action.statistics_key)
    return normaliser.statistics_from(data_set, feature_type)


def _with_lerobot_names(normaliser: Normaliser, statistics_of: Mapping[FeatureType, Statistics]) -> Statistics | None:
    """Returns all tensors of the normaliser's file, with `statistics_of` under LeRobot's names; None if the file
    already holds them under these names."""
    renamed: Statistics = {}
    for feature_type, statistics in statistics_of.items():
        renamed |= {f"{FEATURES[feature_type]}.{name}": tensor for name, tensor in statistics.items()}
    tensors = normaliser.tensors
    if all(name in tensors and torch.equal(tensors[name], tensor) for name, tensor in renamed.items()):
        return None
    features = [FEATURES[feature_type] for feature_type in statistics_of]
    others = {name: tensor for name, tensor in tensors.items() if not ends_with(name.rpartition(".")[0], features)}
    return {name: tensor.contiguous().clone() for name, tensor in (others | renamed).items()}


def _changed_files(contents: Mapping[str, bytes], normaliser: Normaliser, tensors: Statistics) -> dict[str, bytes]:
    """Returns the files of a processor that change when its statistics become `tensors`: the new contents by file name.
    contents: the present contents of all files, by name."""
    if normaliser.state_file is not None:
        return {normaliser.state_file: save(tensors)}
    tree = json.loads(contents[normaliser.file])
    name = f"{normaliser.file.removesuffix('.json')}_{normaliser.step_name}.safetensors"
    for step in tree["steps"]:
        if step.get("registry_name") == normaliser.step_name:
            step["state_file"] = name
    return {normaliser.file: json.dumps(tree, indent=2).encode(), name: save(tensors)}

"""Conversion of actions to tokens (bins at the end of the vocabulary) and to a robot's units (data set statistics)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmrl.errors import UserError


@dataclass(frozen=True)
class ActionCodec:
    """Actions in [-1, 1] as the last `bins` ids below `vocabulary`, as OpenVLA numbers them (arXiv 2406.09246).

    The `bins` edges linspace(-1, 1, bins) enclose bins - 1 intervals; number k = 1 .. bins of the edge at or below an
    action is the id vocabulary - k, and the id stands for the middle of its interval. The ids of k = bins (an action of
    exactly 1) and k = bins - 1 stand for the same action. As a column of the logits an id counts from `first`.
    """

    vocabulary: int
    bins: int = 256

    @property
    def first(self) -> int:
        """The lowest action id, whose column is 0."""
        return self.vocabulary - self.bins

    def encode(self, actions: Tensor) -> Tensor:
        """Returns the columns [...] int64 of actions [...], which are clamped to [-1, 1]. Raises ValueError for NaN."""
        if bool(actions.isnan().any()):
            raise ValueError("actions hold NaN")
        edges = torch.linspace(-1, 1, self.bins, dtype=torch.float64)
        number = torch.bucketize(actions.detach().cpu().double().clamp(-1, 1), edges, right=True)
        return (self.bins - number).to(actions.device)

    def decode(self, columns: Tensor) -> Tensor:
        """Returns the actions [...] fp32 of columns [...], the middles of their intervals."""
        edges = torch.linspace(-1, 1, self.bins, dtype=torch.float64, device=columns.device)
        centres = ((edges[1:] + edges[:-1]) / 2).float()
        return centres[(self.bins - columns - 1).clamp(0, self.bins - 2)]

    def ids(self, columns: Tensor) -> Tensor:
        return columns + self.first


class Units(Protocol):
    """A conversion between a policy's actions and a robot's units, [..., chunk, action] each."""

    def to_robot(self, actions: NDArray) -> NDArray[np.float64]: ...

    def from_robot(self, actions: NDArray) -> NDArray[np.float64]: ...


@dataclass(frozen=True)
class ActionStatistics:
    """The 1 % and 99 % quantiles of a data set's actions, [action] each; where `mask` is False a number is not
    scaled (grippers). bounded: whether a policy's actions are clamped to [-1, 1]."""

    q01: NDArray[np.float64]
    q99: NDArray[np.float64]
    mask: NDArray[np.bool_]
    bounded: bool = True

    def to_robot(self, actions: NDArray) -> NDArray[np.float64]:
        """Converts actions a [..., action] to the robot's units: (a + 1) / 2 (q99 - q01) + q01."""
        actions = actions.clip(-1, 1) if self.bounded else actions
        return np.where(self.mask, 0.5 * (actions + 1) * (self.q99 - self.q01) + self.q01, actions)

    def from_robot(self, actions: NDArray) -> NDArray[np.float64]:
        """Computes the inverse of `to_robot`, clamped to [-1, 1]; 0 where q01 = q99."""
        span = self.q99 - self.q01
        scaled = 2 * (actions - self.q01) / np.where(span == 0, 1, span) - 1
        return np.where(self.mask, np.where(span == 0, 0, scaled).clip(-1, 1), actions)


def scaled_to(bounds: tuple[NDArray[np.float64], NDArray[np.float64]], bounded: bool) -> ActionStatistics | None:
    """Returns statistics that stretch [-1, 1] over a simulator's bounds, [action] each; numbers without two finite
    bounds stay as they are. None where nothing is stretched."""
    low, high = bounds
    finite = np.isfinite(low) & np.isfinite(high) & (high > low)
    mask = finite & ((low != -1) | (high != 1))
    if not mask.any():
        return None
    return ActionStatistics(np.where(mask, low, -1.0), np.where(mask, high, 1.0), mask, bounded)


@dataclass(frozen=True)
class StateQuantiles:
    """The 1 % and 99 % quantiles of a data set's states, [state] each, as OpenVLA-OFT scales them."""

    q01: NDArray[np.float64]
    q99: NDArray[np.float64]
    mask: NDArray[np.bool_]

    def scaled(self, state: NDArray) -> NDArray[np.float32]:
        """Scales states [..., state] by the quantiles and clips them to [-1, 1]."""
        state = state.astype(np.float64)
        within = 2 * (state - self.q01) / (self.q99 - self.q01 + 1e-8) - 1
        return np.where(self.mask, within, state).clip(-1, 1).astype(np.float32)


def load_statistics(path: str, key: str | None, action_dim: int, *, bounded: bool = True) -> ActionStatistics:
    """Reads OpenVLA's statistics: {data set: {"action": {"q01": [...], "q99": [...], "mask": [...]}}}, as a file of its
    own or under "norm_stats" of a model's config.json. Without a mask every number is scaled.

    Raises UserError naming the file and the key that is missing, unknown or of another length than `action_dim`.
    """
    return ActionStatistics(*_quantiles(path, key, "action", action_dim, "the robot takes"), bounded)


def load_state_quantiles(path: str, key: str | None, state_dim: int) -> StateQuantiles:
    """Reads the entry "proprio" of the same file. Raises UserError as `load_statistics`."""
    return StateQuantiles(*_quantiles(path, key, "proprio", state_dim, "the simulator's state has"))


def _quantiles(
    path: str, key: str | None, kind: str, size: int, whose: str
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_]]:
    """Reads the 1 % and 99 % quantiles of `kind` and the mask of scaled numbers, [size] each. Raises UserError as
    `load_statistics`."""
    key, statistics = _data_set(path, key)
    quantiles = statistics.get(kind, {})
    for needed in ("q01", "q99"):
        if needed not in quantiles:
            raise UserError(f"action.statistics={path}: {key}.{kind}.{needed} is missing")
    mask = quantiles.get("mask", [True] * len(quantiles["q01"]))
    for name, values in (("q01", quantiles["q01"]), ("q99", quantiles["q99"]), ("mask", mask)):
        if len(values) != size:
            raise UserError(f"action.statistics={path}: {key}.{kind}.{name} has {len(values)} numbers, {whose} {size}")
    try:
        low, high = np.array(quantiles["q01"], float), np.array(quantiles["q99"], float)
    except (TypeError, ValueError) as error:
        raise UserError(f"action.statistics={path}: {key}.{kind} must hold numbers: {error}") from None
    scaled = np.array(mask, bool)
    if not (np.isfinite(low) & np.isfinite(high) & (low <= high))[scaled].all():
        raise UserError(
            f"action.statistics={path}: {key}.{kind}.q01 must be finite and at most q99, got {low} and {high}"
        )
    return low, high, scaled


def _data_set(path: str, key: str | None) -> tuple[str, dict[str, Any]]:
    """Returns the name of the data set and its statistics. Raises UserError for an unknown or ambiguous one."""
    file = Path(path)
    if file.is_dir():
        file = next((file / n for n in ("dataset_statistics.json", "config.json") if (file / n).is_file()), file)
    try:
        data_sets: object = json.loads(file.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise UserError(f"action.statistics={path}: {error}") from None
    data_sets = data_sets.get("norm_stats", data_sets) if isinstance(data_sets, dict) else None
    if (
        not isinstance(data_sets, dict)
        or not data_sets
        or not all(isinstance(statistics, dict) for statistics in data_sets.values())
    ):
        raise UserError(f"action.statistics={path}: expected a mapping from data sets to statistics")
    names = ", ".join(data_sets)
    if key is None and len(data_sets) != 1:
        raise UserError(f"action.statistics={path} holds {names}; choose one with action.statistics_key")
    key = key or next(iter(data_sets))
    if key not in data_sets:
        raise UserError(f"action.statistics_key={key} is not in {path}; it holds {names}")
    return key, data_sets[key]

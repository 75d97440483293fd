"""Conversion of actions to tokens (bins at the end of the vocabulary), and to a robot's units (normalisation)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class ActionCodec:
    """Encodes numbers of actions in [-1, 1] as tokens, in OpenVLA's numbering (arXiv 2406.09246).

    The edges linspace(-1, 1, bins) enclose bins - 1 intervals. A number whose lower edge is edge k (1 to bins) has the
    token id vocabulary - k, which decodes to the middle of its interval. The ids of k = bins (exactly 1) and
    k = bins - 1 decode to the same number. A column is an id minus `first`: its position among the action logits.
    """

    vocabulary: int  # token ids are below it; the last `bins` of them are action tokens
    bins: int = 256

    @property
    def first(self) -> int:
        """The lowest action id, whose column is 0."""
        return self.vocabulary - self.bins

    def encode(self, actions: Tensor) -> Tensor:
        """Returns the columns [...] int64 (token ids minus `first`) of numbers `actions` [...], which are clamped to
        [-1, 1]. Raises ValueError for NaN."""
        if bool(actions.isnan().any()):
            raise ValueError("actions hold NaN")
        edges = torch.linspace(-1, 1, self.bins, dtype=torch.float64)
        edge = torch.bucketize(actions.detach().cpu().double().clamp(-1, 1), edges, right=True)  # k, from 1
        return (self.bins - edge).to(actions.device)

    def decode(self, columns: Tensor) -> Tensor:
        """Returns the numbers [...] fp32 that columns [...] (token ids minus `first`) stand for: the centers of their
        intervals."""
        edges = torch.linspace(-1, 1, self.bins, dtype=torch.float64, device=columns.device)
        centers = ((edges[1:] + edges[:-1]) / 2).float()
        # `bins` edges bound bins - 1 intervals: column 0, which only 1.0 gets, stands for the last one too
        return centers[(self.bins - columns - 1).clamp(0, self.bins - 2)]

    def ids(self, columns: Tensor) -> Tensor:
        """Returns the token ids of columns, [...] each."""
        return columns + self.first


class ActionNormalizer(Protocol):
    """Converts actions [..., action] between a policy's normalised range and a robot's units."""

    @property
    def clipped(self) -> bool:
        """True if `from_robot` clips actions to the range of the statistics."""
        ...

    def to_robot(self, actions: NDArray) -> NDArray[np.float64]:
        """Converts normalised actions to the robot's units."""
        ...

    def from_robot(self, actions: NDArray) -> NDArray[np.float64]:
        """Normalises actions in the robot's units."""
        ...

    def distance_from_center(self, actions: NDArray) -> NDArray[np.float64]:
        """Returns the distance of actions in the robot's units from the center of the statistics, in half ranges or in
        standard deviations, [..., action]."""
        ...


@dataclass(frozen=True)
class ActionStatistics:
    """Normalises actions by the 1 % and 99 % quantiles of a data set, which become -1 and 1.

    q01 and q99 may hold other statistics, such as min and max, or mean - std and mean + std."""

    q01: NDArray[np.float64]  # [action]
    q99: NDArray[np.float64]  # [action]
    mask: NDArray[np.bool_]  # [action]; False: the number is passed on as it is (grippers)
    bounded: bool = True  # whether `to_robot` clips the policy's actions to [-1, 1]
    clipped: bool = True  # whether `from_robot` clips to [-1, 1]

    def to_robot(self, actions: NDArray) -> NDArray[np.float64]:
        """Converts actions a [..., action] to the robot's units: (a + 1) / 2 (q99 - q01) + q01."""
        actions = actions.clip(-1, 1) if self.bounded else actions
        return np.where(self.mask, 0.5 * (actions + 1) * (self.q99 - self.q01) + self.q01, actions)

    def from_robot(self, actions: NDArray) -> NDArray[np.float64]:
        """Normalises actions [..., action]: the inverse of `to_robot`, clipped to [-1, 1] if `clipped`; 0 where q01 =
        q99."""
        span = self.q99 - self.q01
        scaled = np.where(span == 0, 0, 2 * (actions - self.q01) / np.where(span == 0, 1, span) - 1)
        return np.where(self.mask, scaled.clip(-1, 1) if self.clipped else scaled, actions)

    def distance_from_center(self, actions: NDArray) -> NDArray[np.float64]:
        """Returns the distance from the center of the range, in half ranges, [..., action]: at most 1 inside the range.

        Where `mask` is False it is the absolute value. Where q01 = q99 it is 0 at that value and infinity elsewhere."""
        half_range, center = (self.q99 - self.q01) / 2, (self.q99 + self.q01) / 2
        distance = np.abs(actions - center)
        constant = half_range == 0
        from_constant = np.where(distance <= 1e-4 * np.maximum(1, np.abs(center)), 0, np.inf)
        in_half_ranges = distance / np.where(constant, 1, half_range)
        return np.where(self.mask, np.where(constant, from_constant, in_half_ranges), np.abs(actions))


def statistics_from_bounds(
    bounds: tuple[NDArray[np.float64], NDArray[np.float64]], bounded: bool
) -> ActionStatistics | None:
    """Returns statistics that map [-1, 1] to a simulator's action bounds (low and high, [action] each).

    bounded: whether the policy's actions are clipped to [-1, 1]. Numbers without two finite bounds are not scaled.
    Returns None if no number is scaled."""
    low, high = bounds
    finite = np.isfinite(low) & np.isfinite(high) & (high > low)
    mask = finite & ((low != -1) | (high != 1))
    if not mask.any():
        return None
    return ActionStatistics(np.where(mask, low, -1.0), np.where(mask, high, 1.0), mask, bounded)


@dataclass(frozen=True)
class StateQuantiles:
    """Normalises states by the 1 % and 99 % quantiles of a data set, as OpenVLA-OFT does."""

    q01: NDArray[np.float64]  # [state]
    q99: NDArray[np.float64]  # [state]
    mask: NDArray[np.bool_]  # [state]; False: the number is passed on as it is
    clipped: bool = True  # whether normalised states are clipped to [-1, 1]

    def normalize(self, state: NDArray) -> NDArray[np.float32]:
        """Maps states [..., state] so that q01 becomes -1 and q99 becomes 1; clips them to [-1, 1] if `clipped`."""
        state = state.astype(np.float64)
        normalized = 2 * (state - self.q01) / (self.q99 - self.q01 + 1e-8) - 1
        scaled = np.where(self.mask, normalized, state)
        if not self.clipped:
            # numbers that are constant in the data, which could become very large without clipping
            scaled = np.where(self.mask & (self.q99 == self.q01), 0, scaled)
        return (scaled.clip(-1, 1) if self.clipped else scaled).astype(np.float32)

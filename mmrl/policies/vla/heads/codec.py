"""Conversion of actions to tokens (bins at the end of the vocabulary) and to a robot's units (data set statistics)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


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
    """A conversion between a policy's actions and a robot's units, [..., chunk, action] each. clipped: whether a
    robot's actions are clipped to the range that it knows."""

    @property
    def clipped(self) -> bool: ...

    def to_robot(self, actions: NDArray) -> NDArray[np.float64]: ...

    def from_robot(self, actions: NDArray) -> NDArray[np.float64]: ...

    def outside(self, actions: NDArray) -> NDArray[np.float64]:
        """Returns how far a robot's actions lie from the middle, in halves of the range or deviations."""
        ...


@dataclass(frozen=True)
class ActionStatistics:
    """The 1 % and 99 % quantiles of a data set's actions, [action] each; where `mask` is False a number is not
    scaled (grippers). bounded: whether a policy's actions are clamped to [-1, 1]; clipped: whether those of a robot
    are, too. Other numbers than quantiles may stand for -1 and 1, such as mean - std and mean + std."""

    q01: NDArray[np.float64]
    q99: NDArray[np.float64]
    mask: NDArray[np.bool_]
    bounded: bool = True
    clipped: bool = True

    def to_robot(self, actions: NDArray) -> NDArray[np.float64]:
        """Converts actions a [..., action] to the robot's units: (a + 1) / 2 (q99 - q01) + q01."""
        actions = actions.clip(-1, 1) if self.bounded else actions
        return np.where(self.mask, 0.5 * (actions + 1) * (self.q99 - self.q01) + self.q01, actions)

    def from_robot(self, actions: NDArray) -> NDArray[np.float64]:
        """Computes the inverse of `to_robot`, clamped to [-1, 1] if `clipped`; 0 where q01 = q99."""
        span = self.q99 - self.q01
        scaled = np.where(span == 0, 0, 2 * (actions - self.q01) / np.where(span == 0, 1, span) - 1)
        return np.where(self.mask, scaled.clip(-1, 1) if self.clipped else scaled, actions)

    def outside(self, actions: NDArray) -> NDArray[np.float64]:
        """Returns how far a robot's actions lie from the middle of the range, in halves of it: at most 1 inside.
        Numbers that are not scaled count as they are; those without a range are 0 at it, infinity elsewhere."""
        half, middle = (self.q99 - self.q01) / 2, (self.q99 + self.q01) / 2
        apart = np.abs(actions - middle)
        still = np.where(apart <= 1e-4 * np.maximum(1, np.abs(middle)), 0, np.inf)
        return np.where(self.mask, np.where(half == 0, still, apart / np.where(half == 0, 1, half)), np.abs(actions))


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
    clipped: bool = True

    def scaled(self, state: NDArray) -> NDArray[np.float32]:
        """Scales states [..., state] by the quantiles and clips them to [-1, 1] if `clipped`."""
        state = state.astype(np.float64)
        within = 2 * (state - self.q01) / (self.q99 - self.q01 + 1e-8) - 1
        scaled = np.where(self.mask, within, state)
        if not self.clipped:
            scaled = np.where(self.mask & (self.q99 == self.q01), 0, scaled)  # a number that never moved
        return (scaled.clip(-1, 1) if self.clipped else scaled).astype(np.float32)

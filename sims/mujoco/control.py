"""What an action of the tabletop means: how far the fingertips' setpoint moves, or where it shall be.

An aim [4] is a place in metres (3) and the gripper (1 closes, -1 opens): what scripted experts think in. All places are
the fingertips', in the axes of the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mmrl.sims.mujoco.arm import HIGH, LOW

STEP = 0.03  # metres that the setpoint moves at most in one control step, unless a task goes slower


@dataclass(frozen=True)
class Control:
    """wanted(setpoint [3], action [4], step): where an action puts the setpoint, before it is kept in the box of the
    fingertips. action(setpoint, aim [4], step): the action that leads to an aim, [4] within [-1, 1]. step: metres that
    the setpoint moves at most."""

    wanted: Callable[[NDArray, NDArray, float], NDArray]
    action: Callable[[NDArray, NDArray, float], NDArray]


def moved(setpoint: NDArray, action: NDArray, step: float) -> NDArray:
    return setpoint + step * np.clip(action[:3], -1, 1)


def move_to(setpoint: NDArray, aim: NDArray, step: float) -> NDArray:
    """A straight move, at most one step long."""
    way = (aim[:3] - setpoint) / step
    return np.append(way * min(1.0, 1.0 / max(float(np.linalg.norm(way)), 1e-9)), aim[3])


def placed(setpoint: NDArray, action: NDArray, step: float) -> NDArray:
    """At most one step on the straight way to the place that the action names."""
    return towards(setpoint, LOW + (np.clip(action[:3], -1, 1) + 1) / 2 * (HIGH - LOW), step)


def place_of(setpoint: NDArray, aim: NDArray, step: float) -> NDArray:
    """The place itself, -1 to 1 from corner to corner of the box, however far it is."""
    return np.append(2 * (aim[:3] - LOW) / (HIGH - LOW) - 1, aim[3])


def towards(start: NDArray, end: NDArray, longest: float) -> NDArray:
    """The point on the way from `start` to `end`, all in metres, at most `longest` from `start`."""
    way = end - start
    return start + way * min(1.0, longest / max(float(np.linalg.norm(way)), 1e-9))


CONTROLS = {"delta": Control(moved, move_to), "position": Control(placed, place_of)}

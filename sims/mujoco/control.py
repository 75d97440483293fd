"""Controllers of the tabletop: an action is a displacement of the fingertips' setpoint, or its target position.

An aim [4], the output of scripted experts, is a position in metres (3) and the gripper (1 closes, -1 opens). All
positions are the fingertips', in the axes of the table.
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
    """A controller. setpoint_after(setpoint [3], action [4], step): the setpoint after an action, before it is clipped
    to the box of the fingertips. action(setpoint, aim [4], step): the action that leads to an aim, [4] within [-1, 1].
    step: metres that the setpoint moves at most."""

    setpoint_after: Callable[[NDArray, NDArray, float], NDArray]
    action: Callable[[NDArray, NDArray, float], NDArray]


def delta_setpoint(setpoint: NDArray, action: NDArray, step: float) -> NDArray:
    return setpoint + step * np.clip(action[:3], -1, 1)


def delta_action(setpoint: NDArray, aim: NDArray, step: float) -> NDArray:
    """Returns the action that moves the setpoint straight towards `aim`, by at most one step."""
    way = (aim[:3] - setpoint) / step
    return np.append(way * min(1.0, 1.0 / max(float(np.linalg.norm(way)), 1e-9)), aim[3])


def position_setpoint(setpoint: NDArray, action: NDArray, step: float) -> NDArray:
    """Returns the setpoint moved towards the position that the action gives, by at most one step."""
    return towards(setpoint, LOW + (np.clip(action[:3], -1, 1) + 1) / 2 * (HIGH - LOW), step)


def position_action(setpoint: NDArray, aim: NDArray, step: float) -> NDArray:
    """Returns the action for the position `aim`, scaled to -1..1 over the box of the fingertips, however far it is."""
    return np.append(2 * (aim[:3] - LOW) / (HIGH - LOW) - 1, aim[3])


def towards(start: NDArray, end: NDArray, longest: float) -> NDArray:
    """Returns the point on the line from `start` to `end` that is at most `longest` from `start`; all in metres."""
    way = end - start
    return start + way * min(1.0, longest / max(float(np.linalg.norm(way)), 1e-9))


CONTROLS = {"delta": Control(delta_setpoint, delta_action), "position": Control(position_setpoint, position_action)}

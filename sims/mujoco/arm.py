"""The arm: five joints and a parallel gripper that always points down, moved by the position of its fingertips.

Joints: base yaw, shoulder, elbow, wrist pitch, wrist yaw. Because the hand hangs down and its fingers keep the table's
axes, the position of the fingertips fixes all five in closed form: two links in a vertical plane.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

SHOULDER_HEIGHT = 0.20  # all lengths in metres
UPPER_ARM, FOREARM = 0.33, 0.33
HAND_LENGTH = 0.14  # from the wrist down to the point between the fingertips
FINGER_TRAVEL = 0.04  # each finger; the gripper opens to twice that
LOW = np.array([0.25, -0.24, 0.014])  # the box in which the fingertips may be
HIGH = np.array([0.57, 0.24, 0.26])
HOME = np.array([0.36, 0.0, 0.18])


def inverse_kinematics(tip: Sequence[float] | NDArray) -> list[float]:
    """Returns the five joint angles (radians) for the fingertips at `tip` [3], with the elbow up.

    Exact inside the box LOW..HIGH, which lies within reach.
    """
    x, y, z = (float(value) for value in tip)
    radius, height = math.hypot(x, y), z + HAND_LENGTH - SHOULDER_HEIGHT
    distance = math.hypot(radius, height)
    yaw = math.atan2(y, x)
    # by the law of cosines: the angle between the two links, and the angle of the upper arm above the line to the wrist
    inner = math.acos((UPPER_ARM**2 + FOREARM**2 - distance**2) / (2 * UPPER_ARM * FOREARM))
    lift = math.acos((UPPER_ARM**2 + distance**2 - FOREARM**2) / (2 * UPPER_ARM * distance))
    shoulder, elbow = math.atan2(height, radius) + lift, inner - math.pi
    return [yaw, shoulder, elbow, -shoulder - elbow, -yaw]

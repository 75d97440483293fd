"""Scripted experts that compute the next action from the current state. ManiSkill's motion planners plan whole
episodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from mani_skill.envs.sapien_env import BaseEnv

REACH = 0.1  # m that an action of 1 asks for, of pd_ee_delta_pos
BEHIND, ABOVE = 0.07, 0.1  # m from the middle of the cube: where to come down, and how high to travel
ON_TABLE = 0.02  # m, height of the hand that pushes


def push_cube(env: BaseEnv, row: int) -> NDArray[np.float32]:
    """Moves over the table to behind the cube, down, and forward; the gripper stays shut. Returns the action [4]."""
    hand, cube = (part.pose.p[row].cpu().numpy() for part in (env.agent.tcp, env.obj))
    away = hand - cube
    start = cube[:2] - [BEHIND, 0]
    if away[0] < -0.02 and abs(away[1]) < 0.015 and hand[2] < ON_TABLE + 0.02:  # behind the cube and low: push
        goal = [hand[0] + REACH, cube[1], ON_TABLE]
    elif np.linalg.norm(hand[:2] - start) < 0.02:  # over the start of the push: go down
        goal = [*start, ON_TABLE]
    else:
        goal = [*start, ABOVE]
    return np.append((goal - hand) / REACH, -1).clip(-1, 1).astype(np.float32)


EXPERTS: dict[tuple[str, str | None], Callable[[BaseEnv, int], NDArray[np.float32]]] = {
    ("PushCube-v1", "pd_ee_delta_pos"): push_cube,
}

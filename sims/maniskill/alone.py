"""Actors, links and robots of a scene that is alone in its process's physics, as on the CPU.

ManiSkill is written for many scenes at once. A pose in a single scene is converted to five tensors when a task reads
it, ten times in an action, and a robot's targets to a tensor for each joint. Here the same numbers pass as one array.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import sapien
import torch
from mani_skill.utils.structs import Actor, Articulation, Link, Pose

if TYPE_CHECKING:
    from mani_skill.envs.sapien_env import BaseEnv


class LoneActor(Actor):
    """A rigid object whose pose is read as one array of 7 numbers."""

    @property
    def pose(self) -> Pose:
        return batch_of_one(self._objs[0].pose)

    @pose.setter
    def pose(self, pose: Any) -> None:
        Actor.pose.fset(self, pose)


class LoneLink(Link):
    """A link of a robot whose pose is read as one array of 7 numbers."""

    @property
    def pose(self) -> Pose:
        return batch_of_one(self._objs[0].entity_pose)

    @pose.setter
    def pose(self, pose: Any) -> None:
        Link.pose.fset(self, pose)


class LoneArticulation(Articulation):
    """A robot whose joint targets are set from one array."""

    def set_joint_drive_targets(self, targets: Any, joints: Any = None, joint_indices: Any = None) -> None:
        """Sets the target of each of `joints`. targets: [1, joint], in radians or metres."""
        numbers = np.asarray(targets[0], np.float32)
        for i, joint in enumerate(joints):
            joint._objs[0].drive_target = numbers[i : i + 1]


def batch_of_one(pose: sapien.Pose) -> Pose:
    """Converts SAPIEN's pose to ManiSkill's, a tensor [1, 7]: position (3) and quaternion (4)."""
    return Pose(torch.from_numpy(np.concatenate((pose.p, pose.q))[None]))


def use_lone_classes(env: BaseEnv) -> None:
    """Replaces the classes of actors, robots and links in a scene on the CPU by LoneActor, LoneArticulation and
    LoneLink. Merged objects, which stand for several, stay as they are."""
    for actor in env.scene.actors.values():
        swap(actor, Actor, LoneActor)
    for robot in env.scene.articulations.values():
        swap(robot, Articulation, LoneArticulation)
        for link in robot.links:
            swap(link, Link, LoneLink)


def swap(entity: Any, batched: type, single: type) -> None:
    """Changes the class of an entity with one object from `batched` to `single`, which converts no tensors. Entities of
    a task's own subclass keep it."""
    kind: type = type(entity)
    if kind is batched and len(entity._objs) == 1:
        entity.__class__ = single

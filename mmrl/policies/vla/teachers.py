"""Teacher policies for the distillation of robot policies: checks that they can score the student's episodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn

from mmrl.errors import UserError
from mmrl.policies.vla.heads.codec import ActionNormalizer
from mmrl.policies.vla.heads.head import Head
from mmrl.policies.vla.off_policy import to_robot_units
from mmrl.policies.vla.saved import ARCHITECTURE_KEYS, CONFIG, has_own_weights, read_saved_config
from mmrl.policies.vla.settings import ActionHead, Actions
from mmrl.protocols.parts import Policy
from mmrl.protocols.teachers import Teachers
from mmrl.settings import plain
from mmrl.sims import Observation, VectorSim

SIZES = ("width", "depth", "layers")  # options of a head that may differ between teacher and student


class ActionPolicy(Protocol):
    """Inputs and scale of actions of a `VisionLanguageActionPolicy`, in which student and teacher must agree."""

    action: Actions
    sim: VectorSim
    normalizer: ActionNormalizer | None
    caches_prefixes: bool

    @property
    def module(self) -> nn.Module: ...

    def prepare(self, observation: Observation) -> list[Any]:
        """Preprocesses each row of an observation."""
        ...

    def collate(self, prepared: list[Any]) -> dict[str, Tensor]:
        """Collates rows of `prepare` to the network's inputs."""
        ...

    def robot_state(self, observation: Observation) -> Tensor:
        """Returns the robot's states, [row, state]."""
        ...


class ActionTeachers(Teachers):
    """Teachers that replay the student's episodes. They get its preprocessed observations, its states and its sampled
    chunks, so they must read observations and scale actions as it does."""

    def __init__(self, taught: ActionPolicy, head: Head) -> None:
        """taught: the student; head: its action head."""
        super().__init__(taught.module)
        self.taught, self.head = taught, head

    def check(self, path: str, guidance: float | None) -> None:
        """Raises UserError for a teacher whose head has other decisions than the student's, without a
        trained head, for guidance, and for a student that stores encoded observations, which a teacher cannot read."""
        if guidance is not None:
            raise UserError(
                "teacher.guidance is for models that denoise images, but model.type=vision_language_action has none; "
                "remove it"
            )
        if self.taught.caches_prefixes:
            raise UserError(
                f"teacher {path} needs the images of rollouts, but with a frozen backbone these store its outputs "
                "only; train a part of the backbone (model.freeze)"
            )
        if not (Path(path) / CONFIG).is_file() and has_own_weights(self.head):
            raise UserError(
                f"teacher {path} has no trained action head of type {self.taught.action.head.type}; take the folder "
                "final of a run"
            )
        teacher_actions(self.taught.action, path)

    def _load(self, path: str, guidance: float | None) -> Policy:
        """Loads a teacher. Raises UserError if it reads observations or scales actions otherwise than the student."""
        teacher = super()._load(path, guidance)
        check_reads_alike(path, self.taught, cast(ActionPolicy, teacher))
        return teacher


def teacher_actions(action: Actions, path: str) -> Actions:
    """Returns the student's section `action` with the sizes of the head that is saved at `path`. A model that no run
    saved, such as a published one, gets the student's section.

    Raises UserError for another option that the head's decisions depend on and whose value differs."""
    if not (Path(path) / CONFIG).is_file():
        return action
    saved = read_saved_config(Path(path))
    keys = ["type", *(key for key in action.head.architecture_keys if key not in SIZES)]
    values = [(f"head.{key}", saved["head"].get(key), plain(action.head)[key]) for key in keys]
    values += [(key, saved[key], plain(action)[key]) for key in ARCHITECTURE_KEYS]
    for key, theirs, ours in values:
        if theirs != ours:
            raise UserError(
                f"teacher {path} was trained with action.{key}={theirs}, the model has {ours}; take a teacher with the "
                "model's value"
            )
    return action.model_copy(update={"head": with_sizes(action.head, saved["head"])})


def with_sizes(head: ActionHead, saved: dict[str, Any]) -> ActionHead:
    """Returns the settings of a head with the sizes of a saved head, of which `saved` are the settings."""
    return head.model_copy(update={key: saved[key] for key in head.architecture_keys if key in SIZES})


def check_reads_alike(path: str, student: ActionPolicy, teacher: ActionPolicy) -> None:
    """Raises UserError unless both policies make the same inputs of the first observation of an episode, and convert
    actions to the robot's units alike. The episode is the teacher's: it starts in the teacher's simulator."""
    sim = teacher.sim
    observation = sim.reset([0], [sim.simulator.tasks[0]])
    ours, theirs = (
        {**policy.collate(policy.prepare(observation)), "state": policy.robot_state(observation)}
        for policy in (student, teacher)
    )
    differing = ({*ours} ^ {*theirs}) | {name for name in {*ours} & {*theirs} if not alike(ours[name], theirs[name])}
    if differing:
        raise UserError(
            f"teacher {path} makes other inputs ({', '.join(sorted(differing))}) of an observation than the model, so "
            "it cannot score its episodes; take a teacher that was trained from the same kind of model, with the same "
            "action.* and task.* options"
        )
    actions = torch.linspace(-1, 1, 5)[:, None, None].expand(-1, 1, sim.simulator.action_dim)
    if not np.allclose(to_robot_units(actions, student.normalizer), to_robot_units(actions, teacher.normalizer)):
        raise UserError(
            f"teacher {path} converts actions to the robot's units by other statistics than the model; take a teacher "
            "that was trained with the same action.statistics"
        )


def alike(one: Tensor, other: Tensor) -> bool:
    """Returns whether two tensors have the same shape and the same values, up to rounding."""
    return one.shape == other.shape and bool(torch.allclose(one.cpu().double(), other.cpu().double(), atol=1e-6))

"""Records of policy steps from which episodes can be stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from mmrl.protocols.trajectory import Trajectory
from mmrl.sims import Observation


@dataclass(frozen=True)
class StepRecord:
    """The part of a policy step that its replay does not need. after: the observation after the last step of an
    episode; None: the next step has it."""

    observation: Observation  # of one row
    actions: NDArray[np.float32]  # [chunk, action], in the robot's units
    reward: float  # of the simulator, summed over the chunk
    terminated: bool
    after: Observation | None


class RecordedStep(Protocol):
    """A policy step with its record."""

    @property
    def record(self) -> StepRecord | None: ...

    @property
    def valid(self) -> Tensor: ...


def trajectory_of(steps: Sequence[RecordedStep], *, success: bool) -> Trajectory | None:
    """Returns an episode; None for one that was not recorded to its end, or in which an action is no finite number."""
    records = [step.record for step in steps if step.record is not None]
    if not records or len(records) < len(steps):
        return None
    last = records[-1].after
    actions = np.stack([record.actions for record in records])
    if last is None or not np.isfinite(actions).all():
        return None
    observations = [*(record.observation for record in records), last]
    return Trajectory(
        instruction=records[0].observation.instructions[0],
        cameras=records[0].observation.cameras,
        images=np.concatenate([observation.images for observation in observations]),
        state=np.concatenate([observation.state for observation in observations]),
        actions=actions,
        valid=np.stack([step.valid.numpy() for step in steps]),
        rewards=np.array([record.reward for record in records], np.float32),
        terminated=records[-1].terminated,
        success=success,
    )

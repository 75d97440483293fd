"""Episodes of a policy: what is noted while they are played, and the columns and records that are made of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmrl.policies.vla.heads.head import Chosen
from mmrl.protocols.trajectory import Trajectory
from mmrl.rollouts import Episode, Prompt, Rollouts, Sample, Steps
from mmrl.sims import Observation, Step


@dataclass(frozen=True)
class StepRecord:
    """The part of a policy step that its replay does not need. after: the observation after the last step of an
    episode; None: the next step has it."""

    observation: Observation  # of one row
    actions: NDArray[np.float32]  # [chunk, action], in the robot's units
    reward: float  # of the simulator, summed over the chunk
    terminated: bool
    after: Observation | None


@dataclass(frozen=True)
class PolicyStep:
    """One policy call of an episode: observation, action chunk, and which actions of the chunk were executed. record:
    what is stored of it, where episodes are recorded."""

    observation: object  # of the backbone's `prepare`; or, of a frozen one, its last layer [token, width]
    state: Tensor  # [state], the numbers for the critic alone included
    chosen: Chosen  # without the leading dimension
    valid: Tensor  # [chunk] bool
    record: StepRecord | None = None


class Episodes(list[list[PolicyStep]]):
    """Policy steps by rollout, with the stacked tensors that `replay` needs, which are the same each time that a
    minibatch is learned from. Observations are collated again each time, for they may be large."""

    def __init__(self, episodes: list[list[PolicyStep]], device: torch.device) -> None:
        """episodes: with at least one policy step in all."""
        super().__init__(episodes)
        self.flat = [policy_step for episode in episodes for policy_step in episode]
        indices = [(b, s) for b, episode in enumerate(episodes) for s in range(len(episode))]
        self.row, self.step = torch.tensor(indices, device=device).unbind(1)
        self.state = torch.stack([policy_step.state for policy_step in self.flat]).to(device)
        self.valid = torch.stack([policy_step.valid for policy_step in self.flat]).to(device)
        self.chosen = {name: values.to(device) for name, values in stacked_choices(self.flat).items()}


def stacked_choices(policy_steps: Sequence[PolicyStep]) -> Chosen:
    """Stacks the choices of at least one policy step, [step, ...] each."""
    return {
        name: torch.stack([policy_step.chosen[name] for policy_step in policy_steps]) for name in policy_steps[0].chosen
    }


class EpisodeRecord:
    """The record of an episode while it is played; lost until it begins."""

    def __init__(self, prompt: Prompt, *, reasons: bool) -> None:
        """reasons: whether the head draws latents before a chunk."""
        self.prompt, self.reasons = prompt, reasons
        self.instruction, self.lost = "", True
        self.success = self.success_at_end = self.terminated = False
        self.length, self.bootstrap = 0, 0.0
        self.policy_steps: list[PolicyStep] = []
        self.values: list[float] = []  # by policy step
        self.reasoning: list[int] = []  # number of latents by policy step
        self.rewards: list[float] = []  # by step of the simulator
        self.frames: list[NDArray[np.uint8]] = []
        self.labels: list[Prompt] = []  # observations with an expert's actions, by policy step

    def begin(self, observation: Observation, row: int, film: bool) -> None:
        self.instruction, self.lost = observation.instructions[row], False
        if film:
            self.frames.append(observation.images[row])

    def add_label(self, observation: Observation, actions: NDArray[np.float32]) -> None:
        """Keeps an observation of one row, and what the expert would do there, [chunk, action]."""
        name = f"{self.prompt.id}-{len(self.labels)}"
        label = {"observation": observation, "actions": actions}
        self.labels.append(Prompt(name, self.instruction, metadata=label))

    def add_step(self, step: Step, row: int, film: bool) -> None:
        """Adds one executed chunk of a row of the batch: reward, success, length, and its image where `film`."""
        valid = step.valid[row]
        self.lost |= bool(step.dropped[row])
        if valid.any():
            self.success_at_end = bool(step.success[row][valid][-1])
            self.success |= bool(step.success[row].any())
            self.terminated |= bool(step.terminated[row].any())
            self.length += int(valid.sum())
            if film:
                self.frames.append(step.observation.images[row])
        self.rewards.append(float(step.reward[row].sum()))

    @property
    def sample(self) -> Sample:
        episode = Episode(
            self.instruction,
            self.success,
            self.success_at_end,
            self.length,
            sum(self.rewards),
            self.lost,
            np.stack(self.frames) if self.frames else None,
            mean_or_nan(self.reasoning) if self.reasons else None,
        )
        return Sample(self.prompt, response="success" if self.success else "failure", episode=episode)


def mean_or_nan(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers) if numbers else math.nan


def step_record(shown: Observation, actions: NDArray[np.float32], i: int, step: Step, row: int) -> StepRecord:
    """Returns the record of a policy step. i: its position in the observations and actions [i, chunk, action] of the
    call; row: of the simulator."""
    return StepRecord(
        shown.select([i]),
        actions[i],
        float(step.reward[row].sum()),
        bool(step.terminated[row].any()),
        step.observation.select([row]) if step.ended[row] else None,
    )


def trajectory_of(steps: Sequence[PolicyStep], *, success: bool) -> Trajectory | None:
    """Returns an episode; None for one that was not recorded to its end, or in which an action is not a finite
    number."""
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


def steps_of(records: Sequence[EpisodeRecord]) -> Steps:
    """Collects rewards, values and ends by policy step, from which returns are computed."""
    blank = torch.zeros(len(records), max(1, *(len(record.policy_steps) for record in records)))
    steps = Steps(blank.bool(), blank.clone(), blank.clone(), blank.bool(), blank.clone())
    for b, record in enumerate(records):
        n = len(record.policy_steps)
        steps.mask[b, :n] = not record.lost
        steps.rewards[b, :n] = torch.tensor(record.rewards)
        steps.values[b, :n] = torch.tensor(record.values)
        if n and not record.lost:
            steps.terminated[b, n - 1] = record.terminated
            steps.bootstrap[b, n - 1] = record.bootstrap
    return steps


def step_units(rollouts: Rollouts) -> dict[str, int]:
    """Returns the policy steps and the episodes of rollouts."""
    episodes = sum(sample.episode is not None for sample in rollouts.samples)
    return {"policy_steps": sum(len(steps) for steps in rollouts.inputs), "episodes": episodes}


def start_of(prompt: Prompt) -> tuple[int, str]:
    """Returns the seed and the task of a start state."""
    return prompt.metadata["seed"], prompt.metadata["task"]

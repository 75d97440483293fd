"""Records of a robot policy's episodes while they are played, and the tensors that are built from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmrl.policies.vla.heads.head import SampledChunks
from mmrl.protocols.trajectory import Trajectory
from mmrl.rollouts import Episode, Prompt, Rollouts, Sample, Steps
from mmrl.sims import Observation, Step


@dataclass(frozen=True)
class StepRecord:
    """The data of one policy step that a stored episode (`Trajectory`) holds."""

    observation: Observation  # of one row
    actions: NDArray[np.float32]  # [chunk, action], in the robot's units
    reward: float  # of the simulator, summed over the chunk
    terminated: bool
    final_observation: Observation | None  # after the last step of an episode; None for other steps


@dataclass(frozen=True)
class PolicyStep:
    """One policy call of an episode: an observation, the sampled chunk, and which of its actions were executed."""

    observation: object  # a row of the backbone's `prepare`, or of `cache_rows` where prefixes are cached
    state: Tensor  # [state], including the numbers that only the critic may read
    sampled: SampledChunks  # of this step: tensors without the leading dimension
    valid: Tensor  # [chunk] bool, which actions were executed
    record: StepRecord | None = None  # if episodes are stored


class Episodes(list[list[PolicyStep]]):
    """Policy steps by rollout, with the stacked tensors that `replay` needs.

    They are stacked once, since a minibatch is replayed several times. Observations may be large and are collated at
    each replay."""

    def __init__(self, episodes: list[list[PolicyStep]], device: torch.device) -> None:
        """episodes: policy steps of each rollout, at least one in total."""
        super().__init__(episodes)
        self.flat = [policy_step for episode in episodes for policy_step in episode]
        indices = [(row, step) for row, episode in enumerate(episodes) for step in range(len(episode))]
        self.row, self.step = torch.tensor(indices, device=device).unbind(1)  # [flat policy step] each
        self.state = torch.stack([policy_step.state for policy_step in self.flat]).to(device)
        self.valid = torch.stack([policy_step.valid for policy_step in self.flat]).to(device)
        self.sampled = {name: values.to(device) for name, values in stack_samples(self.flat).items()}


def stack_samples(policy_steps: Sequence[PolicyStep]) -> SampledChunks:
    """Stacks the sampled chunks of one policy step or more: tensors [step, ...]."""
    return {
        name: torch.stack([policy_step.sampled[name] for policy_step in policy_steps])
        for name in policy_steps[0].sampled
    }


class EpisodeRecord:
    """The record of an episode while it is played. `lost` is True before the episode begins, and after the simulator
    dropped it."""

    def __init__(self, prompt: Prompt, *, samples_latents: bool) -> None:
        """samples_latents: whether the head samples latents before a chunk."""
        self.prompt, self.samples_latents = prompt, samples_latents
        self.instruction, self.lost = "", True  # until `begin`: an episode that never starts counts as lost
        self.success = self.success_at_end = self.terminated = False
        self.length = 0  # executed actions
        self.bootstrap = 0.0  # the critic's value of the final observation
        self.policy_steps: list[PolicyStep] = []
        self.values: list[float] = []  # by policy step
        self.num_latents: list[int] = []  # by policy step
        self.rewards: list[float] = []  # by step of the simulator
        self.frames: list[NDArray[np.uint8]] = []  # [height, width, 3] each
        self.labels: list[Prompt] = []  # by policy step: the observation and the expert's actions, see `add_label`

    def begin(self, observation: Observation, row: int, film: bool) -> None:
        """Starts the episode with the first observation of a row, whose image is kept if `film`."""
        self.instruction, self.lost = observation.instructions[row], False
        if film:
            self.frames.append(observation.images[row])

    def add_label(self, observation: Observation, actions: NDArray[np.float32]) -> None:
        """Appends a prompt for `demonstrate`: an observation of one row, and the actions [chunk, action] that the
        expert would execute there."""
        name = f"{self.prompt.id}-{len(self.labels)}"
        label = {"observation": observation, "actions": actions}
        self.labels.append(Prompt(name, self.instruction, metadata=label))

    def add_step(self, step: Step, row: int, film: bool) -> None:
        """Adds the simulator's results for one executed chunk: reward, success and length, and the image after it if
        `film`. row: the row of `step` in which the episode is played."""
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
        """The sample that reward functions score."""
        episode = Episode(
            instruction=self.instruction,
            success=self.success,
            success_at_end=self.success_at_end,
            length=self.length,
            reward=sum(self.rewards),
            lost=self.lost,
            frames=np.stack(self.frames) if self.frames else None,
            reasoning=mean_or_nan(self.num_latents) if self.samples_latents else None,
        )
        return Sample(self.prompt, response="success" if self.success else "failure", episode=episode)


def mean_or_nan(numbers: Sequence[float]) -> float:
    """Returns the mean, NaN for an empty sequence."""
    return sum(numbers) / len(numbers) if numbers else math.nan


def make_step_record(
    observations: Observation, actions: NDArray[np.float32], i: int, step: Step, row: int
) -> StepRecord:
    """Builds the record of entry i of a policy call on n observations. actions: [n, chunk, action], in the robot's
    units; step: the simulator's results for all of its rows; row: the simulator's row that entry i belongs to."""
    return StepRecord(
        observation=observations.select([i]),
        actions=actions[i],
        reward=float(step.reward[row].sum()),
        terminated=bool(step.terminated[row].any()),
        final_observation=step.observation.select([row]) if step.ended[row] else None,
    )


def build_trajectory(steps: Sequence[PolicyStep], *, success: bool) -> Trajectory | None:
    """Builds the trajectory of an episode from its policy steps. Returns None if it was not recorded to its end, or if
    an action is not finite."""
    records = [step.record for step in steps if step.record is not None]
    if not records or len(records) < len(steps):
        return None
    last = records[-1].final_observation
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


def collect_steps(records: Sequence[EpisodeRecord]) -> Steps:
    """Collects rewards, values and ends of episodes in tensors [episode, policy step], from which returns are
    computed."""
    # at least one column, if all episodes were lost at once
    zeros = torch.zeros(len(records), max(1, *(len(record.policy_steps) for record in records)))
    steps = Steps(
        mask=zeros.bool(),
        rewards=zeros.clone(),
        values=zeros.clone(),
        terminated=zeros.bool(),
        bootstrap=zeros.clone(),
    )
    for row, record in enumerate(records):
        n = len(record.policy_steps)
        steps.mask[row, :n] = not record.lost
        steps.rewards[row, :n] = torch.tensor(record.rewards)
        steps.values[row, :n] = torch.tensor(record.values)
        if n and not record.lost:
            steps.terminated[row, n - 1] = record.terminated
            steps.bootstrap[row, n - 1] = record.bootstrap
    return steps


def count_units(rollouts: Rollouts) -> dict[str, int]:
    """Returns how many policy steps and how many episodes the rollouts hold, by the names of these units."""
    episodes = sum(sample.episode is not None for sample in rollouts.samples)
    return {"policy_steps": sum(len(steps) for steps in rollouts.inputs), "episodes": episodes}


def seed_and_task(prompt: Prompt) -> tuple[int, str]:
    """Returns the seed and the task's name, which determine the start state that `prompt` stands for."""
    return prompt.metadata["seed"], prompt.metadata["task"]

"""Stored observations and actions of a vision-language-action policy: encodings for value functions, and new chunks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmrl.policies.vla.episodes import PolicyStep
from mmrl.policies.vla.heads.codec import ActionNormalizer
from mmrl.policies.vla.heads.head import ActionSampling, EncodedPrefix, SampledChunks
from mmrl.policies.vla.settings import Actions
from mmrl.protocols.abilities import ChunkChoice, SampledActions, SampledNoise
from mmrl.protocols.trajectory import RobotObservation
from mmrl.rollouts import Prompt, Rollouts, Sample
from mmrl.samplers.chain import derive_seed
from mmrl.schedules.schedule import Schedule
from mmrl.sims import Observation, VectorSim


class EncodingPolicy(Protocol):
    """The parts of `VisionLanguageActionPolicy` that encode observations and make rollouts."""

    module: Any  # backbone, head and critic
    choice: ChunkChoice | None  # how it chooses among several chunks while it plays; None: one is sampled
    action: Actions
    sim: VectorSim
    normalizer: ActionNormalizer | None
    temperature: Schedule

    @property
    def device(self) -> torch.device: ...
    def prepare(self, observation: Observation) -> list[Any]: ...
    def robot_state(self, observation: Observation) -> Tensor: ...
    def collate(self, prepared: list[Any]) -> dict[str, Tensor]: ...
    def make_rollouts(
        self, samples: list[Sample], policy_steps: list[list[PolicyStep]], *, single: bool
    ) -> Rollouts: ...


class OffPolicyAccess:
    """Encodes stored observations and chunks of actions as vectors, and samples chunks at stored observations."""

    def __init__(self, policy: EncodingPolicy) -> None:
        self.policy = policy

    @property
    def encoding_sizes(self) -> tuple[int, int]:
        """Lengths of the vectors that `encode_observations` and `encode_chunks` return."""
        simulator = self.policy.sim.simulator
        # 1: the mask of executed actions
        return self.policy.module.backbone.width + simulator.state_dim, self.chunk_length * (simulator.action_dim + 1)

    @property
    def chunk_length(self) -> int:
        """The number of actions in a chunk."""
        return self.policy.action.chunk

    @property
    def noise_size(self) -> int:
        """The number of numbers that the head samples for a chunk."""
        return math.prod(self.policy.module.head.sampled_shape)

    def choose_by(self, choice: ChunkChoice) -> None:
        self.policy.choice = choice

    def act(self, prefix: EncodedPrefix, state: Tensor, sampling: ActionSampling) -> SampledChunks:
        """Samples a chunk for each of n observations as the head's `act` does; with a `choice` several, of which it
        returns the one with the highest score. prefix: of the observations; state: [n, state]."""
        policy, head = self.policy, self.policy.module.head
        policy_state = policy.module.policy_state(state)
        first: SampledChunks = head.act(prefix, policy_state, sampling)
        if policy.choice is None or not policy.choice.ready():
            return first
        candidates = [first]
        for k in range(1, policy.choice.count):
            seeds = [derive_seed(seed, k) for seed in sampling.seeds]
            candidates.append(head.act(prefix, policy_state, replace(sampling, seeds=seeds)))
        observations, whole = self._as_features(prefix, state), self._whole(sampling.seeds)
        scores = [policy.choice.score(observations, self._as_vectors(c["actions"], whole).cpu()) for c in candidates]
        best, rows = torch.stack(scores).argmax(0), torch.arange(len(sampling.seeds))
        return {name: torch.stack([c[name] for c in candidates])[best, rows] for name in first}

    @torch.no_grad()
    def encode_observations(self, observations: Sequence[RobotObservation]) -> Tensor:
        """Encodes observations, which have one row each, as vectors [observation, width + state] fp32: the last hidden
        state of the prefix's last token, and the robot's state."""
        policy, observation = self.policy, stack_observations(observations)
        prefix = policy.module.encode(policy.collate(policy.prepare(observation)))
        return self._as_features(prefix, policy.robot_state(observation))

    def encode_chunks(self, chunks: Sequence[NDArray[np.float32]]) -> Tensor:
        """Encodes chunks of executed actions [executed, action], in the robot's units, as vectors [chunk, chunk length
        x (action + 1)] fp32: normalised actions, padded with 0 to the chunk length, and the mask of executed
        actions."""
        actions, valid = pad_chunks(chunks, self.chunk_length, self.policy.sim.simulator.action_dim)
        if self.policy.normalizer is not None:
            actions = self.policy.normalizer.from_robot(actions).astype(np.float32)
        executed = torch.from_numpy(actions).where(valid[..., None], 0)
        return torch.cat([executed.flatten(1), valid.float()], 1)

    @torch.no_grad()
    def sample(self, observations: Sequence[RobotObservation], seeds: Sequence[int], *, logp: bool) -> SampledActions:
        """Samples a chunk at each observation, as in a rollout. observations: each has one row; seeds: one for each
        observation; logp: whether the log-probabilities of the chunks are computed too."""
        observation = stack_observations(observations)
        return self._sample(self.policy.prepare(observation), self.policy.robot_state(observation), seeds, logp)

    def resample(self, rollouts: Rollouts, rows: Sequence[int], seeds: Sequence[int], *, logp: bool) -> SampledActions:
        """Samples a chunk at the first observation of each rollout with an index in `rows`, as in a rollout, but keeps
        the gradient. seeds: one for each row; logp: as in `sample`."""
        return self._sample(*self._recorded(rollouts, rows), seeds, logp)

    def resample_noise(
        self, rollouts: Rollouts, rows: Sequence[int], seeds: Sequence[int], *, logp: bool
    ) -> SampledNoise:
        """Samples noise of a `steered` head at the first observation of each rollout with an index in `rows`, as in a
        rollout, with its gradient and without denoising it. seeds, logp: as in `resample`."""
        prefix, observations, state = self._encode(*self._recorded(rollouts, rows))
        head = self.policy.module.head
        sampled = head.sample_noise(prefix, state, ActionSampling(list(seeds), self.policy.temperature.value))
        scored = head.score(prefix, state, sampled, self._whole(seeds), None, None)["logp"].sum(1) if logp else None
        return SampledNoise(observations, sampled["noise"].float().flatten(1), None, scored)

    @torch.no_grad()
    def denoise_prior(self, observations: Sequence[RobotObservation], seeds: Sequence[int]) -> SampledNoise:
        """Samples standard normal noise for each observation, which has one row, and the chunk that the frozen flow of
        a `steered` head denoises from it. seeds: one for each observation."""
        observation = stack_observations(observations)
        prefix, encoded, state = self._encode(self.policy.prepare(observation), self.policy.robot_state(observation))
        head = self.policy.module.head
        noise = head.sample_prior(seeds).to(state.device)
        chunks = self._as_vectors(head.denoise(prefix, state, noise), self._whole(seeds))
        return SampledNoise(encoded, noise.flatten(1), chunks, None)

    @staticmethod
    def _recorded(rollouts: Rollouts, rows: Sequence[int]) -> tuple[list[Any], Tensor]:
        """Returns the prepared first observations and the states [row, state] of the rollouts `rows`."""
        policy_steps = [rollouts.inputs[row][0] for row in rows]
        state = torch.stack([policy_step.state for policy_step in policy_steps])
        return [policy_step.observation for policy_step in policy_steps], state

    def _encode(self, prepared: list[Any], state: Tensor) -> tuple[Any, Tensor, Tensor]:
        """Returns the prefixes of n observations, the observations as vectors without gradient [n, size], and the
        states as the head reads them. prepared: n rows of `prepare`; state: [n, state]."""
        policy, module = self.policy, self.policy.module
        prefix = module.encode(policy.collate(prepared))
        return prefix, self._as_features(prefix, state), module.policy_state(state.to(policy.device))

    @staticmethod
    def _as_features(prefix: EncodedPrefix, state: Tensor) -> Tensor:
        """Returns n observations as vectors without gradient, [n, width + state] fp32; see `encode_observations`."""
        return torch.cat([prefix.last.detach().float().cpu(), state.float().cpu()], 1)

    def _whole(self, seeds: Sequence[int]) -> Tensor:
        """Returns a mask of whole chunks, one for each seed, [seed, chunk] bool."""
        return torch.ones(len(seeds), self.chunk_length, dtype=torch.bool, device=self.policy.device)

    def _as_vectors(self, actions: Tensor, valid: Tensor) -> Tensor:
        """Encodes actions [n, chunk, action] of the head as `encode_chunks` does. valid: [n, chunk] bool."""
        actions, normalizer = actions.float(), self.policy.normalizer
        if normalizer is None or normalizer.clipped:  # as executed actions are clamped
            actions = actions.clamp(-1, 1)
        return torch.cat([actions.flatten(1), valid.float()], 1)

    def _sample(self, prepared: list[Any], state: Tensor, seeds: Sequence[int], logp: bool) -> SampledActions:
        """Samples a chunk for each of n observations; returns rows like those of `encode_observations` and
        `encode_chunks`. prepared: n rows of `prepare`; state: [n, state]; seeds, logp: as in `sample`."""
        prefix, observations, state = self._encode(prepared, state)
        policy, head, valid = self.policy, self.policy.module.head, self._whole(seeds)
        sampled = head.act(prefix, state, ActionSampling(list(seeds), policy.temperature.value))
        scored = head.score(prefix, state, sampled, valid, None, None)["logp"].sum(1) if logp else None
        return SampledActions(observations, self._as_vectors(sampled["actions"], valid), scored)

    @torch.no_grad()
    def propose(self, prompts: Sequence[Prompt], seeds: Sequence[int], groups: Sequence[int]) -> Rollouts:
        """Samples a chunk for each prompt as in a rollout, at the `Observation` in its metadata["observation"].

        seeds: one for each prompt; groups: for each prompt the seed of its group. Returns rollouts of one policy step,
        whose prompts have the chunk as metadata["proposal"], [chunk, action] in the robot's units, and its seed as
        metadata["proposal_seed"]."""
        policy = self.policy
        observation = stack_observations([prompt.metadata["observation"] for prompt in prompts])
        prepared, state = policy.prepare(observation), policy.robot_state(observation)
        sampling = ActionSampling(list(seeds), policy.temperature.value, groups=list(groups))
        prefix = policy.module.encode(policy.collate(prepared))
        sampled = policy.module.head.act(prefix, policy.module.policy_state(state.to(policy.device)), sampling)
        actions = to_robot_units(sampled["actions"], policy.normalizer).astype(np.float32)
        sampled = {name: values.cpu() for name, values in sampled.items()}
        valid = torch.ones(self.chunk_length, dtype=torch.bool)
        policy_steps, proposed = [], []
        for i, prompt in enumerate(prompts):
            row_sampled = {name: values[i] for name, values in sampled.items()}
            policy_steps.append([PolicyStep(prepared[i], state[i], row_sampled, valid)])
            proposal = {"proposal": actions[i], "proposal_seed": seeds[i]}
            proposed.append(replace(prompt, metadata={**prompt.metadata, **proposal}))
        return policy.make_rollouts([Sample(prompt) for prompt in proposed], policy_steps, single=True)


def pad_chunks(
    chunks: Sequence[NDArray[np.float32]], length: int, action_dim: int
) -> tuple[NDArray[np.float32], Tensor]:
    """Pads or truncates n chunks [executed, action] to `length` actions. Returns the actions [n, length, action], 0 at
    padding, and their mask [n, length] bool, False at padding."""
    actions = np.zeros((len(chunks), length, action_dim), np.float32)
    valid = torch.zeros(actions.shape[:2], dtype=torch.bool)
    for i, chunk in enumerate(chunks):
        executed = chunk[:length]
        actions[i, : len(executed)], valid[i, : len(executed)] = executed, True
    return actions, valid


def stack_observations(observations: Sequence[RobotObservation]) -> Observation:
    """Concatenates n observations of one row each to one observation of n rows."""
    return Observation(
        np.concatenate([observation.images for observation in observations]),
        np.concatenate([observation.state for observation in observations]),
        [observation.instructions[0] for observation in observations],
        observations[0].cameras,
    )


def to_robot_units(actions: Tensor, normalizer: ActionNormalizer | None) -> NDArray[np.float64]:
    """Converts the policy's actions [..., action] to the robot's units; without a normaliser clips them to [-1, 1]."""
    numbers = actions.float().cpu().numpy().astype(np.float64)
    numbers[~np.isfinite(numbers)] = np.nan  # the simulator counts NaN; clipping would turn infinity into an action
    return numbers.clip(-1, 1) if normalizer is None else normalizer.to_robot(numbers)

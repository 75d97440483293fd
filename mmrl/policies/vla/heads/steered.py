"""A head that learns the distribution of the noise from which a frozen flow head denoises."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from einops import repeat
from torch import Tensor

from mmrl.errors import UserError
from mmrl.policies.vla.heads.flow import FlowHead
from mmrl.policies.vla.heads.gaussian import GaussianHead, SquashedGaussianHead
from mmrl.policies.vla.heads.head import EXTRA, ActionSampling, EncodedPrefix, Head, SampledChunks
from mmrl.policies.vla.heads.steered_settings import SteeredActions
from mmrl.policies.vla.settings import Actions
from mmrl.samplers.chain import INITIAL, gaussian_noise


class SteeredHead(Head):
    """Samples noise from a trained Gaussian head, `noise`, and denoises it with a frozen flow head, `base` (the actor
    of DSRL, arXiv 2506.15799).

    Actions are a fixed function of the noise, so ratios and gradients of p(noise) are those of the whole policy. The
    Gaussian reads the last hidden state of the prefix's last token and the robot's state. With `settings.bound` its
    samples go through tanh, so that the noise is bounded."""

    def __init__(
        self, settings: SteeredActions, base: FlowHead, action: Actions, action_dim: int, state_dim: int, width: int
    ) -> None:
        """width: size of the backbone's hidden states. Raises UserError if `settings.noises` is above the number of
        actions that the flow plans."""
        super().__init__(action, action_dim, state_dim)
        self.base: FlowHead = base.requires_grad_(False)
        self.last_layer_only = base.last_layer_only
        flow_chunk, size = base.latent
        noises = settings.noises or flow_chunk
        if noises > flow_chunk:
            raise UserError(
                f"action.head.noises={noises}, but a chunk of the flow has {flow_chunk} actions; lower it or remove it"
            )
        self.num_repeated = flow_chunk - noises  # how often the last sampled noise is repeated
        kind = GaussianHead if settings.bound is None else SquashedGaussianHead
        self.noise = kind(settings, action.model_copy(update={"chunk": noises}), size, state_dim, width)
        if isinstance(self.noise, SquashedGaussianHead) and settings.bound is not None:
            self.noise.bound = settings.bound

    @property
    def decisions(self) -> int:
        return self.noise.decisions

    @property
    def sampled_shape(self) -> tuple[int, int]:
        return self.noise.shape

    def act(self, prefix: EncodedPrefix, state: Tensor, sampling: ActionSampling) -> SampledChunks:
        """Samples noise from the Gaussian head and denoises it; see `Head.act`. Returns also "noise", which `score`
        reads."""
        sampled = self.sample_noise(prefix, state, sampling)
        return {**sampled, "actions": self.denoise(prefix, state, sampled["noise"])}

    def sample_noise(self, prefix: EncodedPrefix, state: Tensor, sampling: ActionSampling) -> SampledChunks:
        """Samples noise from the Gaussian head as `act` does, without denoising it."""
        sampled = self.noise.act(prefix, state, sampling)
        noise = sampled.pop("actions")
        return {**sampled, "noise": noise}

    def sample_prior(self, seeds: Sequence[int]) -> Tensor:
        """Samples the noise of the flow alone, which is standard normal: [seed, noises, latent action] fp32."""
        return gaussian_noise(list(seeds), INITIAL, self.noise.shape)

    def score(
        self,
        prefix: EncodedPrefix,
        state: Tensor,
        sampled: SampledChunks,
        valid: Tensor,
        old: Tensor | None,
        reference: Tensor | None,
    ) -> dict[str, Tensor]:
        """Scores the sampled noise; see `Head.score`. Adds the extra "displacement" [n, decisions], which is the same
        for all decisions of a chunk, unless the noise is bounded: then it has no closed form."""
        mean = self.noise.mean(prefix, state)
        sampled_noise = {**sampled, "actions": sampled["noise"]}
        fields = self.noise.score_around(mean, sampled_noise, self._noise_mask(valid), old, reference)
        if isinstance(self.noise, SquashedGaussianHead):
            return fields
        # squared 2-Wasserstein distance of each number from the flow's own standard normal noise
        displacement = mean.square() + (self.noise.clamped_log_std().exp() - 1).square()
        mean_displacement = displacement.mean((1, 2))
        return {**fields, EXTRA + "displacement": repeat(mean_displacement, "n -> n d", d=self.decisions)}

    def denoise(self, prefix: EncodedPrefix, state: Tensor, noise: Tensor) -> Tensor:
        """Denoises noise [n, noises, latent action], whose last row stands for all further actions. Returns chunks [n,
        chunk, action]."""
        repeated = noise[:, -1:].expand(-1, self.num_repeated, -1)
        return self.base.denoise(prefix, state, torch.cat([noise, repeated], 1))

    def decision_mask(self, valid: Tensor, sampled: SampledChunks) -> Tensor:
        return self.noise.decision_mask(self._noise_mask(valid), sampled)

    def encode_demonstrations(self, actions: Tensor, seeds: Sequence[int]) -> SampledChunks:
        raise NotImplementedError("the noise of a demonstrated chunk is not known")

    def _noise_mask(self, valid: Tensor) -> Tensor:
        """Returns which noises are scored, [n, noises] bool: all noises of a chunk if any of its actions was
        executed."""
        return repeat(valid.any(1), "n -> n c", c=self.noise.shape[0])

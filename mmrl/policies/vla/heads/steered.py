"""A frozen flow, and a Gaussian that learns to draw the noise that it denoises."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from einops import repeat
from torch import Tensor

from mmrl.errors import UserError
from mmrl.policies.vla.heads.flow import FlowHead
from mmrl.policies.vla.heads.gaussian import GaussianHead
from mmrl.policies.vla.heads.head import EXTRA, ActionSampling, Chosen, Head, Reading
from mmrl.policies.vla.heads.steered_settings import SteeredActions
from mmrl.policies.vla.settings import Actions


class SteeredHead(Head):
    """A Gaussian head over the noise of a flow, whose chunks are what the flow makes of it (the actor of DSRL, arXiv
    2506.15799). Actions are a fixed function of the noise, so that ratios and gradients of p(noise) are those of the
    whole. `noise` reads the prompt's last token and the robot's state."""

    def __init__(
        self, settings: SteeredActions, base: FlowHead, action: Actions, action_dim: int, state_dim: int, width: int
    ) -> None:
        """width: of the backbone. Raises UserError for more noises than the flow has."""
        super().__init__(action, action_dim, state_dim)
        self.base: FlowHead = base.requires_grad_(False)
        self.context_only = base.context_only
        rows, size = base.latent
        noises = settings.noises or rows
        if noises > rows:
            raise UserError(f"action.head.noises={noises}, but a chunk of the flow has {rows}")
        self.behind = rows - noises
        self.noise = GaussianHead(settings, action.model_copy(update={"chunk": noises}), size, state_dim, width)

    @property
    def decisions(self) -> int:
        return self.noise.decisions

    def act(self, reading: Reading, state: Tensor, sampling: ActionSampling) -> Chosen:
        drawn = self.noise.act(reading, state, sampling)
        noise = drawn.pop("actions")
        return {**drawn, "noise": noise, "actions": self.denoised(reading, state, noise)}

    def score(
        self,
        reading: Reading,
        state: Tensor,
        chosen: Chosen,
        valid: Tensor,
        old: Tensor | None,
        reference: Tensor | None,
    ) -> dict[str, Tensor]:
        mean, counted = self.noise.mean(reading, state), self._counted(valid)
        drawn = {"actions": chosen["noise"], "temperature": chosen["temperature"]}
        fields = self.noise.scored(mean, drawn, counted, old, reference)
        displacement = mean.square() + (self.noise.spread().exp() - 1).square()
        average = displacement.mean((1, 2))
        return {**fields, EXTRA + "displacement": repeat(average, "n -> n d", d=self.decisions)}

    def denoised(self, reading: Reading, state: Tensor, noise: Tensor) -> Tensor:
        """Returns the chunks [n, chunk, action] that the flow makes of noise [n, noise, latent action]."""
        return self.base.denoised(reading, state, torch.cat([noise, noise[:, -1:].expand(-1, self.behind, -1)], 1))

    def decided(self, valid: Tensor, chosen: Chosen) -> Tensor:
        return self.noise.decided(self._counted(valid), chosen)

    def teach(self, actions: Tensor, seeds: Sequence[int]) -> Chosen:
        raise NotImplementedError("the noise behind a demonstrated chunk is not known")

    def _counted(self, valid: Tensor) -> Tensor:
        """Returns the noises that count [n, noise] bool: all of a chunk of which an action was executed."""
        return repeat(valid.any(1), "n -> n c", c=self.noise.shape[0])

"""A small denoiser for the transformer's place in a diffusers pipeline, which reads what a sentence encoder says."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from torch import Tensor

from mmrl.policies.diffusion.small import TOLD, Modulated, teller, velocity
from mmrl.policies.embeddings import sinusoids


class SentenceDenoiser(ModelMixin, ConfigMixin):
    """A modulated perceptron over all pixels, called as AuraFlow's transformer is. It predicts data and gives a
    velocity.

    A sentence is the mean of its tokens' states, scaled to unit numbers: what sentence encoders are trained for. The
    pipeline puts zeros where a text is padded, by which padding is known.
    """

    @register_to_config
    def __init__(
        self,
        sample_size: int = 16,
        in_channels: int = 3,
        joint_attention_dim: int = 384,
        width: int = 256,
        depth: int = 3,
    ) -> None:
        super().__init__()
        self.condition = teller(joint_attention_dim)
        self.body = Modulated(in_channels * sample_size**2, TOLD, width, depth)

    def forward(
        self, hidden_states: Tensor, encoder_hidden_states: Tensor, timestep: Tensor, return_dict: bool = True, **_: Any
    ) -> tuple[Tensor]:
        """hidden_states [n, channel, height, width]; encoder_hidden_states [n, token, number], 0 where padded; timestep
        [n] in [0, 1] -> velocity like hidden_states, alone in a tuple."""
        sigma = timestep.to(hidden_states)
        told = self.condition(torch.cat([sinusoids(sigma, 32).to(hidden_states), sentence(encoder_hidden_states)], 1))
        return (velocity(self.body.through(hidden_states, told), hidden_states, sigma),)


def sentence(states: Tensor) -> Tensor:
    """[n, number] of unit scale: the direction of the mean of states [n, token, number], of which padding is 0."""
    return F.normalize(states.sum(1), dim=1) * states.shape[2] ** 0.5

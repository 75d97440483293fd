"""A small denoiser that replaces the transformer of a diffusers pipeline and reads a sentence encoder's states."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from torch import Tensor

from mmrl.policies.diffusion.small import CONDITION_WIDTH, Modulated, condition_mlp, velocity
from mmrl.policies.embeddings import sinusoids


class SentenceDenoiser(ModelMixin, ConfigMixin):
    """A modulated perceptron over all pixels, called as AuraFlow's transformer is. It predicts data and gives a
    velocity.

    A sentence is the mean of its tokens' states, scaled to unit variance: sentence encoders are trained for that mean.
    The pipeline zeroes the states of padding, so that it adds nothing."""

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
        self.condition = condition_mlp(joint_attention_dim)
        self.body = Modulated(in_channels * sample_size**2, CONDITION_WIDTH, width, depth)

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        timestep: Tensor,
        return_dict: bool = True,
        **_: object,
    ) -> tuple[Tensor]:
        """Takes hidden_states [n, channel, height, width]; encoder_hidden_states [n, token, number], 0 where padded;
        timestep [n] in [0, 1] -> velocity like hidden_states, alone in a tuple."""
        sigma = timestep.to(hidden_states)
        condition = self.condition(
            torch.cat([sinusoids(sigma, 32).to(hidden_states), sentence(encoder_hidden_states)], 1)
        )
        return (velocity(self.body.run_blocks(hidden_states, condition), hidden_states, sigma),)


def sentence(states: Tensor) -> Tensor:
    """Returns embeddings [n, number] of unit scale: the direction of the mean of states [n, token, number], where
    padding is 0."""
    return F.normalize(states.sum(1), dim=1) * states.shape[2] ** 0.5

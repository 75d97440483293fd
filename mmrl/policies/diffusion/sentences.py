"""A small denoiser in place of the transformer of an AuraFlow pipeline, conditioned on a sentence embedding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from torch import Tensor

from mmrl.policies.diffusion.small import CONDITION_WIDTH, Modulated, condition_mlp, velocity
from mmrl.policies.embeddings import sinusoids


class SentenceDenoiser(ModelMixin, ConfigMixin):
    """An MLP over all pixels with adaptive layer norm, with the call signature of AuraFlow's transformer.

    It predicts data, converted to a velocity. The embedding of a sentence is the mean of the hidden states of its
    tokens, as sentence encoders are trained, scaled to unit variance. The pipeline sets states of padding to 0.
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
        """Takes the arguments that pipelines expect of a transformer. sample_size, in_channels: side and channels of
        latents. joint_attention_dim: size of the text encoder's hidden states. width, depth: width and number of blocks
        of the MLP."""
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
        """Returns the velocity, shaped like hidden_states, in a tuple.

        hidden_states: latents, [n, channel, height, width]; encoder_hidden_states: [n, token, width], 0 for padding;
        timestep: [n], in [0, 1].
        """
        sigma = timestep.to(hidden_states)
        condition = self.condition(
            torch.cat([sinusoids(sigma, 32).to(hidden_states), sentence(encoder_hidden_states)], 1)
        )
        return (velocity(self.body.run_blocks(hidden_states, condition), hidden_states, sigma),)


def sentence(states: Tensor) -> Tensor:
    """Returns sentence embeddings [n, width] of unit variance: the direction of the mean of hidden states [n, token,
    width], which are 0 for padding."""
    return F.normalize(states.sum(1), dim=1) * states.shape[2] ** 0.5

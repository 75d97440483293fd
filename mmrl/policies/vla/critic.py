"""Critics: networks that estimate the value of a robot's observation."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn

from mmrl.errors import UserError
from mmrl.policies.vla.heads.head import EncodedPrefix
from mmrl.policies.vla.heads.perceptron import perceptron
from mmrl.protocols.critic import CriticSettings, SeparateCritic, SharedCritic


class Critic(nn.Module):
    """Base of critics. needs_prefix: whether it reads the backbone's hidden states."""

    needs_prefix: bool

    @abstractmethod
    def forward(self, prefix: EncodedPrefix | None, state: Tensor) -> Tensor:
        """Returns values [n] fp32. prefix: None if the critic does not need it; state: [n, state], including the
        numbers that only a critic may read."""


class Shared(Critic):
    """A critic that reads the last hidden state of the prefix's last token, and the robot's state."""

    needs_prefix = True

    def __init__(self, settings: SharedCritic, width: int, state_dim: int) -> None:
        """width: size of the backbone's hidden states. A new critic returns 0, since its last layer is 0."""
        super().__init__()
        sizes, layers = [width + state_dim, *[settings.width] * settings.layers], list[nn.Module]()
        for in_features, out_features in zip(sizes[:-1], sizes[1:], strict=True):
            layers += [nn.Linear(in_features, out_features), nn.GELU()]
        last = nn.Linear(settings.width, 1)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.layers, self.detach = nn.Sequential(*layers, last), settings.detach

    def forward(self, prefix: EncodedPrefix | None, state: Tensor) -> Tensor:
        assert prefix is not None
        features = prefix.last.detach() if self.detach else prefix.last
        return self.layers(torch.cat([features, state.to(features)], 1)).squeeze(1).float()


class Separate(Critic):
    """A critic that reads only the robot's state."""

    needs_prefix = False

    def __init__(self, settings: SeparateCritic, state_dim: int) -> None:
        super().__init__()
        self.layers = perceptron([state_dim, *[settings.width] * settings.layers], 1)

    def forward(self, prefix: EncodedPrefix | None, state: Tensor) -> Tensor:
        return self.layers(state).squeeze(1).float()


def build(settings: CriticSettings, width: int, state_dim: int) -> Critic:
    """Builds a critic. width: size of the backbone's hidden states. Raises UserError for a type that these policies do
    not support, and for type=separate if the simulator has no state."""
    if isinstance(settings, SharedCritic):
        return Shared(settings, width, state_dim)
    if not isinstance(settings, SeparateCritic):
        raise UserError(
            f"algorithm.critic.type={settings.type} is not for vision-language-action models; use shared or separate"
        )
    if state_dim == 0:
        raise UserError(
            "algorithm.critic.type=separate reads the robot's state, but the simulator has none; use shared"
        )
    return Separate(settings, state_dim)

"""Critics of observations."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn

from mmrl.errors import UserError
from mmrl.policies.vla.heads.head import Reading
from mmrl.policies.vla.heads.perceptron import perceptron
from mmrl.protocols.critic import CriticSettings, SeparateCritic, SharedCritic


class Critic(nn.Module):
    """Estimates the value of an observation. `needs_column`: whether it needs the backbone's reading."""

    reads: bool

    @abstractmethod
    def forward(self, reading: Reading | None, state: Tensor) -> Tensor:
        """Returns values [n] float32. reading: None where the critic does not read it; state: [n, state]."""


class Shared(Critic):
    """A critic of the prompt's last token and the robot's state."""

    reads = True

    def __init__(self, settings: SharedCritic, width: int, state_dim: int) -> None:
        """width: of the backbone."""
        super().__init__()
        sizes, layers = [width + state_dim, *[settings.width] * settings.layers], list[nn.Module]()
        for a, b in zip(sizes[:-1], sizes[1:], strict=True):
            layers += [nn.Linear(a, b), nn.GELU()]
        last = nn.Linear(settings.width, 1)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.layers, self.detach = nn.Sequential(*layers, last), settings.detach

    def forward(self, reading: Reading | None, state: Tensor) -> Tensor:
        assert reading is not None
        read = reading.last.detach() if self.detach else reading.last
        return self.layers(torch.cat([read, state.to(read)], 1)).squeeze(1).float()


class Separate(Critic):
    """A critic of the robot's state alone."""

    reads = False

    def __init__(self, settings: SeparateCritic, state_dim: int) -> None:
        super().__init__()
        self.layers = perceptron([state_dim, *[settings.width] * settings.layers], 1)

    def forward(self, reading: Reading | None, state: Tensor) -> Tensor:
        return self.layers(state).squeeze(1).float()


def build(settings: CriticSettings, width: int, state_dim: int) -> Critic:
    """Builds a critic. width: of the backbone. Raises UserError for a kind that these policies do not have, and where
    the critic has no input."""
    if isinstance(settings, SharedCritic):
        return Shared(settings, width, state_dim)
    if not isinstance(settings, SeparateCritic):
        raise UserError(f"algorithm.critic.type={settings.type} is not a critic of a vision-language-action model")
    if state_dim == 0:
        raise UserError("algorithm.critic.type=separate reads the robot's state, but the simulator has none")
    return Separate(settings, state_dim)

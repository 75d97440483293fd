"""Perceptrons of heads and critics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from torch import nn

Activation = Literal["tanh", "gelu"]
ACTIVATIONS: dict[Activation, type[nn.Module]] = {"tanh": nn.Tanh, "gelu": nn.GELU}


def perceptron(
    sizes: Sequence[int], out: int, *, activation: Activation = "tanh", last_gain: float = 1.0
) -> nn.Sequential:
    """Builds linear layers from sizes[0] inputs through sizes[1:] to `out` outputs. Weights are orthogonal with a gain
    of sqrt(2), the last ones with `last_gain`, and biases 0, as in CleanRL's and ManiSkill's PPO."""
    layers: list[nn.Module] = []
    for a, b in zip(sizes[:-1], sizes[1:], strict=True):
        layers += [orthogonal(nn.Linear(a, b), math.sqrt(2)), ACTIVATIONS[activation]()]
    return nn.Sequential(*layers, orthogonal(nn.Linear(sizes[-1], out), last_gain))


def orthogonal(layer: nn.Linear, gain: float) -> nn.Linear:
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer

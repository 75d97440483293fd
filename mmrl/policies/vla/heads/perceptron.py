"""The multi-layer perceptron (MLP) of heads and critics."""

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
    """Builds an MLP with sizes[0] inputs, hidden layers of sizes[1:] and `out` outputs.

    Weights are orthogonal, with gain `last_gain` in the last layer and sqrt(2) in the others, and biases are 0, as in
    CleanRL's and ManiSkill's PPO."""
    layers: list[nn.Module] = []
    for in_features, out_features in zip(sizes[:-1], sizes[1:], strict=True):
        layers += [orthogonal(nn.Linear(in_features, out_features), math.sqrt(2)), ACTIVATIONS[activation]()]
    return nn.Sequential(*layers, orthogonal(nn.Linear(sizes[-1], out), last_gain))


def orthogonal(layer: nn.Linear, gain: float) -> nn.Linear:
    """Initialises a layer in place, with orthogonal weights and biases of 0, and returns it."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer

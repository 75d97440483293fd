"""Files of weights, and heads of linear layers that are built from them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn


def read_weights(path: str) -> dict[str, Tensor]:
    """Returns the tensors of a file (.safetensors, .pt, .pth), also if they are under the key "model". Pickled code is
    not run. Raises ValueError if there is no such file."""
    if not Path(path).is_file():
        raise ValueError(f"there is no file {path}")
    if path.endswith(".safetensors"):
        from safetensors.torch import load_file

        return load_file(path)
    state = torch.load(path, "cpu", weights_only=True)
    tensors: dict[str, Tensor] = state.get("model", state)
    return tensors


def with_prefix(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Returns the tensors whose names begin with `prefix`, by the rest of their names."""
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def linear_chain(state: Mapping[str, Tensor], activation: type[nn.Module] | None, label: str) -> nn.Sequential:
    """Builds the linear layers in `state`, with or without biases, in the order of the numbers in their names, fp32.

    activation: a module to insert between layers, such as nn.ReLU. label: for the message. Raises ValueError if the
    layers do not fit together.
    """
    names = [name.removesuffix("weight") for name in state if name.endswith("weight")]
    names.sort(key=lambda name: [int(number) for number in re.findall(r"\d+", name)])
    weights = [state[name + "weight"] for name in names]
    fits = all(first.shape[0] == second.shape[1] for first, second in zip(weights, weights[1:], strict=False))
    if not weights or any(weight.dim() != 2 for weight in weights) or not fits:
        raise ValueError(
            f"{label} has weights of shapes {[tuple(weight.shape) for weight in weights]}, not a chain of linear layers"
        )
    layers = nn.Sequential()
    for number, (name, weight) in enumerate(zip(names, weights, strict=True)):
        if number and activation is not None:
            layers.append(activation())
        bias = state.get(name + "bias")
        layer = nn.utils.skip_init(nn.Linear, weight.shape[1], weight.shape[0], bias=bias is not None)
        layer.load_state_dict({"weight": weight.float()} | ({} if bias is None else {"bias": bias.float()}))
        layers.append(layer)
    return layers.eval().requires_grad_(False)

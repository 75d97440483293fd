"""Checks of what parts return. Errors name the key of the part that returned it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmrl.errors import UserError

AXES = {0: "a single number", 1: "by rollout", 2: "by decision"}


def check_values(key: str, values: Any, shape: torch.Size, *, finite: bool = False) -> None:
    """Raises UserError unless `values` are floating-point numbers of this shape, mostly [rollout, decision]. finite:
    NaN and infinite values raise too."""
    _check_tensor(key, values, shape)
    if not values.is_floating_point():
        raise UserError(f"{key} gave values of type {_kind(values)}; expected floating-point numbers")
    if finite and not bool(values.isfinite().all()):
        raise UserError(f"{key} gave {int((~values.isfinite()).sum())} values that are not finite")


def check_mask(key: str, mask: Any, shape: torch.Size) -> None:
    """Raises UserError unless `mask` is a bool tensor of this shape."""
    _check_tensor(key, mask, shape)
    if mask.dtype != torch.bool:
        raise UserError(f"{key} gave values of type {_kind(mask)}; expected bool, True where something is learned")


def check_loss(key: str, loss: Any) -> None:
    """Raises UserError unless `loss` is a 0-d tensor with a gradient."""
    _check_tensor(key, loss, torch.Size())
    if not loss.requires_grad:
        raise UserError(f"{key} gave a loss without a gradient: nothing of the policy's is in it")


def _check_tensor(key: str, values: Any, shape: torch.Size) -> None:
    if not isinstance(values, Tensor):
        raise UserError(f"{key} gave {type(values).__name__}; expected a tensor of shape {list(shape)}")
    if values.shape != shape:
        axes = AXES[len(shape)]
        raise UserError(f"{key} gave values of shape {list(values.shape)}; expected {list(shape)}, {axes}")


def _kind(values: Tensor) -> str:
    return str(values.dtype).removeprefix("torch.")

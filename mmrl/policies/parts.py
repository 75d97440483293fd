"""Computes a batch in parts with activation checkpointing, so that the backward pass holds one part at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch.utils.checkpoint import checkpoint

Part = TypeVar("Part")
Result = TypeVar("Result")


def map_with_checkpointing(compute: Callable[[Part], Result], parts: Sequence[Part]) -> list[Result]:
    """Returns [compute(part) for part in parts]. `compute` must be deterministic.

    If there are several parts, only their inputs are kept in memory, and the backward pass computes each part again.
    """
    if len(parts) == 1 or not torch.is_grad_enabled():
        return [compute(part) for part in parts]
    return [checkpoint(compute, part, use_reentrant=False, preserve_rng_state=False) for part in parts]

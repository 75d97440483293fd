"""Work on a batch in parts, of which a backward pass holds one at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch.utils.checkpoint import checkpoint

Part = TypeVar("Part")
Result = TypeVar("Result")


def by_parts(compute: Callable[[Part], Result], parts: Sequence[Part]) -> list[Result]:
    """Returns `compute(part)` for each part; nothing in `compute` may be random.

    For several parts only their inputs are kept for the backward pass, in which each part is computed again.
    """
    if len(parts) == 1 or not torch.is_grad_enabled():
        return [compute(part) for part in parts]
    return [checkpoint(compute, part, use_reentrant=False, preserve_rng_state=False) for part in parts]

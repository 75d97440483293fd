"""Work on a batch in parts, of which a backward pass holds one at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.utils.checkpoint import checkpoint

Part = TypeVar("Part")
Result = TypeVar("Result")


def by_parts(compute: Callable[[Part], Result], parts: Sequence[Part]) -> list[Result]:
    """What `compute`, in which nothing is random, says of each part.

    Of several parts nothing is kept for a backward pass but what goes in: each is computed again there.
    """
    if len(parts) == 1 or not torch.is_grad_enabled():
        return [compute(part) for part in parts]
    again: Any = checkpoint
    return [again(compute, part, use_reentrant=False, preserve_rng_state=False) for part in parts]

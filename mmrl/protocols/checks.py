"""Checks of tensors that algorithms, terms, shapers and masks return. Errors name the configuration key of the part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from mmrl.errors import UserError
from mmrl.rollouts import Record, Replay

AXES = {0: "a single number", 1: "by rollout", 2: "by decision"}


@contextmanager
def noting_columns(key: str, **records: Record | Replay) -> Iterator[None]:
    """Returns a context that adds a note to an exception of a part that read a column which does not exist: the part's
    configuration key, and the columns of the records that it reads, by their names in the part: micro and replay, or
    rollouts."""
    try:
        yield
    except (AttributeError, TypeError, KeyError, ValueError, AssertionError) as error:
        there = [
            f"{name} has {', '.join(column for column, value in vars(columns).items() if value is not None)}"
            for name, columns in records.items()
        ]
        error.add_note(
            f"raised in {key}. {'; '.join(there)}. Other columns are None unless the part's needs ask for them: "
            'Needs(reference=Reference()) gives ref_logp, Needs(statistics=frozenset({"entropy"})) gives old_entropy'
        )
        raise


def check_pair(key: str, result: object) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns `result` if it is a pair of values and a mapping of statistics. Raises UserError with the key otherwise.
    The two members are checked elsewhere."""
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
        kind = type(result).__name__
        raise UserError(f"{key} gave {kind}; expected values and a mapping of statistics: return values, {{}}")
    return result


def check_values(key: str, values: object, shape: torch.Size, *, finite: bool = False) -> None:
    """Raises UserError unless `values` is a floating-point tensor of this shape, usually [rollout, decision]. finite:
    whether NaN and infinite values raise too."""
    tensor = _check_shape(key, values, shape)
    if not tensor.is_floating_point():
        raise UserError(f"{key} gave values of type {_dtype_name(tensor)}; expected floating-point numbers")
    if finite and not bool(tensor.isfinite().all()):
        raise UserError(f"{key} gave {int((~tensor.isfinite()).sum())} values that are NaN or infinite")


def check_mask(key: str, mask: object, shape: torch.Size) -> None:
    """Raises UserError unless `mask` is a bool tensor of this shape."""
    tensor = _check_shape(key, mask, shape)
    if tensor.dtype != torch.bool:
        raise UserError(
            f"{key} gave values of type {_dtype_name(tensor)}; expected bool, True for what the loss counts"
        )


def check_loss(key: str, loss: object) -> None:
    """Raises UserError unless `loss` is a 0-d tensor with a gradient."""
    if not _check_shape(key, loss, torch.Size()).requires_grad:
        raise UserError(f"{key} gave a loss without a gradient; compute it from `replay`, which has gradients")


def _check_shape(key: str, values: object, shape: torch.Size) -> Tensor:
    """Returns `values` if it is a tensor of that shape. Raises UserError with the key otherwise."""
    if not isinstance(values, Tensor):
        raise UserError(f"{key} gave {type(values).__name__}; expected a tensor of shape {list(shape)}")
    if values.shape != shape:
        axes = AXES[len(shape)]
        raise UserError(f"{key} gave values of shape {list(values.shape)}; expected {list(shape)}, {axes}")
    return values


def _dtype_name(values: Tensor) -> str:
    return str(values.dtype).removeprefix("torch.")

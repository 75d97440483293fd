"""Rollouts that ranks send each other, as bytes."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import Tensor

from mmrl.errors import UserError, describe_error


class Packer(pickle.Pickler):
    """Pickler that writes a tensor which is part of a larger one without the rest."""

    def reducer_override(self, obj: object) -> Any:
        if isinstance(obj, Tensor) and obj.untyped_storage().nbytes() > obj.numel() * obj.element_size():
            return obj.clone(memory_format=torch.contiguous_format).__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def packed(value: object, instead: str) -> bytes:
    """Pickles a value. Raises UserError for what can not be pickled, such as an open file in a prompt's metadata.
    instead: a setting for the message, with which nothing has to be sent."""
    stream = io.BytesIO()
    try:
        Packer(stream, pickle.HIGHEST_PROTOCOL).dump(value)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise UserError(f"a rollout can not be sent to another rank: {describe_error(error)}; set {instead}") from None
    return stream.getvalue()

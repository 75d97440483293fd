"""msgpack with NumPy arrays, in the encoding of openpi's clients: an array is a map of its bytes, dtype and shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgpack
import numpy as np

NUMERIC_KINDS = "biuf"  # values of dtype.kind that are allowed: no objects, no records


def pack(value: object) -> bytes:
    """Encodes a value as msgpack. It may contain arrays and NumPy scalars anywhere.

    Raises TypeError for anything else that msgpack does not encode.
    """
    return msgpack.packb(value, default=_encode)


def unpack(data: bytes) -> Any:
    """Decodes msgpack. Raises ValueError if the bytes are not msgpack, or an array is not of numbers or its bytes do
    not fit its shape."""
    try:
        return msgpack.unpackb(data, object_hook=_decode)
    except msgpack.UnpackException as error:
        raise ValueError(str(error) or type(error).__name__) from None


def _encode(value: object) -> dict[bytes, Any]:
    """Returns the map for an array or a NumPy scalar. Raises TypeError for any other value."""
    if isinstance(value, np.ndarray) and value.dtype.kind in NUMERIC_KINDS:
        return {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": value.shape}
    if isinstance(value, np.generic) and value.dtype.kind in NUMERIC_KINDS:
        return {b"__npgeneric__": True, b"data": value.item(), b"dtype": value.dtype.str}
    raise TypeError(f"{type(value).__name__} cannot be sent: it is neither a number nor an array of numbers")


def _decode(tree: Mapping[Any, Any]) -> Any:
    """Returns the array or the scalar that a map encodes; any other map unchanged."""
    if b"__ndarray__" in tree:
        dtype, shape, data = _dtype(tree.get(b"dtype")), tree.get(b"shape"), tree.get(b"data")
        if not isinstance(data, bytes) or not isinstance(shape, list) or not all(_is_size(size) for size in shape):
            raise ValueError("an array needs data (bytes), dtype and shape (a list of sizes)")
        return np.frombuffer(data, dtype).reshape(shape)
    if b"__npgeneric__" in tree:
        return _dtype(tree.get(b"dtype")).type(tree.get(b"data"))
    return tree


def _dtype(name: object) -> np.dtype[Any]:
    """Returns the dtype `name`. Raises ValueError if it is not numeric, or has more than 8 bytes."""
    try:
        dtype = np.dtype(name) if isinstance(name, str) else None
    except (TypeError, ValueError, SyntaxError):
        dtype = None
    if dtype is None or dtype.kind not in NUMERIC_KINDS or dtype.itemsize > 8:
        raise ValueError(f"an array must have a numeric dtype, not {name!r:.40}")
    return dtype


def _is_size(size: object) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and size >= 0

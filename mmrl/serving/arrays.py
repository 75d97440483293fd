"""msgpack with NumPy arrays, as clients of openpi write them: an array is a map of its bytes, type and shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgpack
import numpy as np

NUMBERS = "biuf"  # kinds of arrays that are read: no objects, no records


def packed(value: object) -> bytes:
    """Returns `value` as msgpack; arrays and NumPy's numbers may stand anywhere in it."""
    return msgpack.packb(value, default=_as_map)


def unpacked(data: bytes) -> Any:
    """Reads msgpack. Raises ValueError for bytes that are none, and for arrays that hold other things than numbers or
    another count of bytes than their shape needs."""
    try:
        return msgpack.unpackb(data, object_hook=_as_array)
    except msgpack.UnpackException as error:
        raise ValueError(str(error) or type(error).__name__) from None


def _as_map(value: object) -> dict[bytes, Any]:
    if isinstance(value, np.ndarray) and value.dtype.kind in NUMBERS:
        return {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": value.shape}
    if isinstance(value, np.generic) and value.dtype.kind in NUMBERS:
        return {b"__npgeneric__": True, b"data": value.item(), b"dtype": value.dtype.str}
    raise TypeError(f"{type(value).__name__} is neither a number nor an array of numbers")


def _as_array(tree: Mapping[Any, Any]) -> Any:
    if b"__ndarray__" in tree:
        kind, shape, data = _dtype(tree.get(b"dtype")), tree.get(b"shape"), tree.get(b"data")
        if not isinstance(data, bytes) or not isinstance(shape, list) or not all(_is_size(size) for size in shape):
            raise ValueError("an array needs data, dtype and shape")
        return np.frombuffer(data, kind).reshape(shape)
    if b"__npgeneric__" in tree:
        return _dtype(tree.get(b"dtype")).type(tree.get(b"data"))
    return tree


def _dtype(name: object) -> np.dtype[Any]:
    try:
        kind = np.dtype(name) if isinstance(name, str) else None
    except (TypeError, ValueError, SyntaxError):
        kind = None
    if kind is None or kind.kind not in NUMBERS or kind.itemsize > 8:
        raise ValueError(f"arrays of numbers are read, not of {name!r:.40}")
    return kind


def _is_size(size: object) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and size >= 0

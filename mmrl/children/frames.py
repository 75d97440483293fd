"""Serialization of dataclasses, tensors, arrays and images between a process and its children, exact to the bit.
Decoding never runs code of the message.

A message is the length of a JSON text, the text, and the bytes of all tensors, arrays and images, one after the other.
Both sides may hold `shared` objects, such as the prompts of a request: the message names them by their index. torch and
Pillow are imported only if a message needs them: simulators may run under interpreters without them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import fields, is_dataclass
from datetime import date, datetime, time
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from PIL import Image

ALIGNED = 8  # bytes; a tensor is read without a copy
LENGTH = 8  # bytes of the text's own length
# Types that JSON lacks, by kind: the type, a function that converts a value to a string, and its inverse.
WRITTEN: dict[str, tuple[type, Callable[[Any], str], Callable[[str], object]]] = {
    "datetime": (datetime, datetime.isoformat, datetime.fromisoformat),
    "date": (date, date.isoformat, date.fromisoformat),
    "time": (time, time.isoformat, time.fromisoformat),
    "decimal": (Decimal, str, Decimal),
}
SETS: dict[str, type] = {"set": set, "frozenset": frozenset}
MODES = ("1", "L", "RGB", "RGBA", "I", "F")  # of images that are fully described by their pixels


def encode(value: object, shared: Sequence[Any] = (), *, repeats: bool = False) -> bytes:
    """Returns the message of plain values, bytes, dates, decimals, lists, tuples, sets, mappings, dataclasses, tensors,
    arrays and images. Raises TypeError for anything else.

    repeats: write a dataclass, tensor, array or image that occurs several times only once.
    """
    writer = MessageWriter(shared, repeats)
    text = json.dumps(writer.tree(value)).encode()
    text += b" " * (-len(text) % ALIGNED)
    return b"".join([len(text).to_bytes(LENGTH, "little"), text, *writer.parts])


def decode(
    message: bytes | bytearray,
    shared: Sequence[Any] = (),
    records: Collection[type] | None = None,
    *,
    repeats: bool = False,
) -> Any:
    """Returns the value that `encode` encoded; arrays and tensors share the memory of a message that is a bytearray.
    Raises ValueError for anything that `encode` has not written.

    records: dataclasses that may be built, for untrusted messages; None: any of a module that has been imported in this
    process. repeats: read what `encode` wrote with it; not for untrusted messages, whose values could be read again
    and again.
    """
    message = message if isinstance(message, bytearray) else bytearray(message)  # writable, as tensors have to be
    begin = LENGTH + int.from_bytes(message[:LENGTH], "little")
    try:
        return Reader(memoryview(message)[begin:], shared, records, repeats).value(json.loads(message[LENGTH:begin]))
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError) as error:  # RuntimeError: too deep
        raise ValueError(f"not an mmrl message ({error!r:.200})") from None


def decode_mapping(
    message: bytes | bytearray, shared: Sequence[Any] = (), records: Collection[type] | None = None
) -> dict[str, Any]:
    """Decodes a message like `decode`. Raises ValueError also for a value that is not a mapping."""
    value = decode(message, shared, records)
    if not isinstance(value, dict):
        raise ValueError("the answer is not a mapping")
    return value


class MessageWriter:
    """Converts a value to a JSON tree and the bytes of its arrays."""

    def __init__(self, shared: Sequence[Any], repeats: bool) -> None:
        self.repeats = repeats
        self.written: dict[int, int] = {}  # numbers of the parts that are complete, by id() of the value
        self.indices = {id(item): index for index, item in enumerate(shared)}
        self.parts: list[bytes] = []
        self.size = 0

    def tree(self, value: object) -> object:
        """Returns `value` as a JSON tree; appends the bytes of its arrays to `parts`."""
        if value is None or type(value) in (bool, int, float, str):
            return value
        if id(value) in self.indices:
            return {"shared": self.indices[id(value)]}
        if type(value) is list:
            return [self.tree(item) for item in value]
        if type(value) is tuple:
            return {"tuple": [self.tree(item) for item in value]}
        if type(value) is dict:
            return {"dict": [[self.tree(key), self.tree(item)] for key, item in value.items()]}
        for kind, (known, write, _) in WRITTEN.items():
            if type(value) is known:
                return {kind: write(value)}
        if type(value) is set or type(value) is frozenset:
            return {type(value).__name__: [self.tree(item) for item in value]}
        if id(value) in self.written:
            return {"again": self.written[id(value)]}
        tree = self.part(value)
        if self.repeats:
            self.written[id(value)] = len(self.written)
        return tree

    def part(self, value: object) -> object:
        """Returns the JSON tree of bytes, an array, a dataclass, a tensor or an image."""
        if type(value) is bytes:
            return {"bytes": ["", [], *self.put(value)]}  # in place of dtype and shape, which bytes lack
        if isinstance(value, np.ndarray | np.generic):
            if value.dtype.hasobject:
                raise TypeError("an array of Python objects")
            kind = "array" if isinstance(value, np.ndarray) else "scalar"
            return {kind: [value.dtype.str, list(value.shape), *self.put(value.tobytes())]}
        if is_dataclass(value) and not isinstance(value, type):
            initial = [field.name for field in fields(value) if field.init]  # arguments to rebuild the record
            record, values = type(value), {name: self.tree(vars(value)[name]) for name in initial}
            return {"record": [record.__module__, record.__qualname__, values]}
        return self.of_library(value)

    def of_library(self, value: object) -> object:
        """Returns the JSON tree of a tensor or an image. If a library is not imported, `value` is not one of its
        objects. Raises TypeError for any other value."""
        if "torch" in sys.modules:
            import torch

            if isinstance(value, torch.Tensor):
                flat = value.detach().cpu().contiguous().flatten()
                name = str(value.dtype).removeprefix("torch.")
                return {"tensor": [name, list(value.shape), *self.put(flat.view(torch.uint8).numpy().tobytes())]}
        if "PIL.Image" in sys.modules:
            from PIL import Image

            if isinstance(value, Image.Image):
                if value.mode not in MODES:
                    raise TypeError(f"an image of mode {value.mode}")
                return {"image": [value.mode, list(value.size), *self.put(value.tobytes())]}
        raise TypeError(f"a {type(value).__module__}.{type(value).__qualname__}")

    def put(self, part: bytes) -> tuple[int, int]:
        """Appends bytes, padded to ALIGNED. Returns their offset and length."""
        begin, padding = self.size, -len(part) % ALIGNED
        self.parts += [part, b"\0" * padding]
        self.size += len(part) + padding
        return begin, len(part)


class Reader:
    """Rebuilds a value from its JSON tree and the bytes of its arrays."""

    def __init__(
        self, numbers: memoryview, shared: Sequence[Any], records: Collection[type] | None, repeats: bool
    ) -> None:
        """numbers: the bytes of all tensors, arrays and images. shared: objects that the tree names by index. records:
        the dataclasses that may be built; None: any of an imported module. repeats: whether an object that occurs again
        is written as {"again": index}."""
        self.numbers, self.shared, self.records, self.repeats = numbers, shared, records, repeats
        self.parts: list[Any] = []  # if `repeats`: the parts so far, to which {"again": index} refers

    def value(self, tree: object) -> Any:
        """Decodes a JSON tree to Python objects: a one-entry mapping {kind: content} is a tuple, dict, record, image,
        tensor, array or number; lists and plain values stay."""
        if isinstance(tree, list):
            return [self.value(item) for item in tree]
        if not isinstance(tree, dict):
            return tree
        ((kind, content),) = tree.items()
        if kind == "shared":
            return self.shared[content]
        if kind == "tuple":
            return tuple(self.value(item) for item in content)
        if kind == "dict":
            return {self.value(key): self.value(item) for key, item in content}
        if kind in WRITTEN:
            return WRITTEN[kind][2](content)  # [2]: the function that reads this kind
        if kind in SETS:
            return SETS[kind](self.value(item) for item in content)
        if kind == "again":
            return self.parts[content]
        part = self.part(kind, content)
        if self.repeats:
            self.parts.append(part)
        return part

    def part(self, kind: str, content: Any) -> object:
        """Decodes a dataclass, bytes, a tensor, an array or an image."""
        if kind == "record":
            module, name, values = content
            return self.record(module, name)(**{key: self.value(item) for key, item in values.items()})
        name, shape, begin, size = content
        return self.numeric(kind, name, shape, self.numbers[begin : begin + size])

    def numeric(self, kind: str, name: str, shape: list[int], part: memoryview) -> object:
        """Decodes a slice of the binary part to an image, tensor, array or NumPy scalar of dtype (or image mode) `name`
        and `shape`."""
        if kind == "bytes":
            return bytes(part)
        if kind == "image":
            return image(name, shape, part)
        if kind == "tensor":
            import torch

            flat = torch.from_numpy(np.frombuffer(part, np.uint8))
            return flat.view(vars(torch)[name]).view(shape)
        array = np.frombuffer(part, np.dtype(name)).reshape(shape)
        return array if kind == "array" else array[()]

    def record(self, module: str, name: str) -> type[Any]:
        """Returns a dataclass by its module and name. Raises ValueError for anything else, and for a dataclass that is
        not in `records`."""
        kind = vars(sys.modules[module])[name] if module in sys.modules else None
        if isinstance(kind, type) and is_dataclass(kind) and (self.records is None or kind in self.records):
            return kind
        raise ValueError(f"{module}:{name} is not one of the data classes that may be received here")


def image(mode: str, size: list[int], pixels: memoryview) -> Image.Image:
    """Returns an image. Raises ValueError if the size does not fit the pixels, which Pillow checks only after it has
    allocated memory."""
    from PIL import Image

    width, height = size
    if mode not in MODES or width * height > 8 * len(pixels):  # mode 1 has eight pixels in a byte
        raise ValueError(f"{len(pixels)} bytes are not an image of mode {mode} and size {size}")
    return Image.frombytes(mode, (width, height), bytes(pixels))

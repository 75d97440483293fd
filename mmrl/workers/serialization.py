"""Records, tensors, arrays and pictures as bytes and back, to the bit. Nothing that is read can run code.

A message is the length of a JSON text, the text, and the numbers of all tensors, arrays and pictures, one after the
other. Both sides may hold `shared` objects, such as the prompts that were asked: the message names them by their place.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mmrl.rollouts import Prompt

ALIGNED = 8  # bytes: a tensor is read from where it lies
LENGTH = 8  # bytes of the text's own length
MODES = ("1", "L", "RGB", "RGBA", "I", "F")  # of pictures that their pixels alone say everything about


def encode(value: Any, shared: Sequence[Any] = ()) -> bytes:
    """Raises TypeError for anything but plain values, lists, tuples, mappings, dataclasses, tensors, arrays and
    pictures."""
    writer = MessageWriter(shared)
    text = json.dumps(writer.tree(value)).encode()
    text += b" " * (-len(text) % ALIGNED)
    return b"".join([len(text).to_bytes(LENGTH, "little"), text, *writer.parts])


def decode(message: bytes, shared: Sequence[Any] = ()) -> Any:
    """What `encode` was given. A dataclass is made only if its module has been imported here. Raises ValueError,
    KeyError or TypeError for what `encode` has not made."""
    size = int.from_bytes(message[:LENGTH], "little")
    numbers = bytearray(memoryview(message)[LENGTH + size :])  # which tensors may be written into
    return Reader(numbers, shared).value(json.loads(message[LENGTH : LENGTH + size]))


def objects_of(prompts: Sequence[Prompt]) -> list[Any]:
    """What the answers to prompts share with them: the prompts and their pictures."""
    return [*prompts, *(image for prompt in prompts for image in prompt.images)]


class MessageWriter:
    def __init__(self, shared: Sequence[Any]) -> None:
        self.places = {id(one): place for place, one in enumerate(shared)}
        self.parts: list[bytes] = []
        self.size = 0

    def tree(self, value: Any) -> Any:
        """`value` for JSON; its numbers are added to `parts`."""
        if value is None or type(value) in (bool, int, float, str):
            return value
        if id(value) in self.places:
            return {"shared": self.places[id(value)]}
        if type(value) is list:
            return [self.tree(one) for one in value]
        if type(value) is tuple:
            return {"tuple": [self.tree(one) for one in value]}
        if type(value) is dict:
            return {"dict": [[self.tree(key), self.tree(one)] for key, one in value.items()]}
        if isinstance(value, Tensor):
            return {"tensor": self.tensor(value.detach())}
        if isinstance(value, np.ndarray | np.generic):
            if value.dtype.hasobject:
                raise TypeError("an array of Python objects")
            kind = "array" if isinstance(value, np.ndarray) else "scalar"
            return {kind: [value.dtype.str, list(value.shape), *self.put(value.tobytes())]}
        if isinstance(value, Image.Image):
            if value.mode not in MODES:
                raise TypeError(f"a picture of mode {value.mode}")
            return {"image": [value.mode, list(value.size), *self.put(value.tobytes())]}
        if is_dataclass(value) and not isinstance(value, type):
            own, held = type(value), {field.name: self.tree(vars(value)[field.name]) for field in fields(value)}
            return {"record": [own.__module__, own.__qualname__, held]}
        raise TypeError(f"a {type(value).__module__}.{type(value).__qualname__}")

    def tensor(self, value: Tensor) -> list[Any]:
        flat = value.cpu().contiguous().flatten()
        name = str(value.dtype).removeprefix("torch.")
        return [name, list(value.shape), *self.put(flat.view(torch.uint8).numpy().tobytes())]

    def put(self, part: bytes) -> tuple[int, int]:
        """Where it begins, and how many bytes it has."""
        begin, padding = self.size, -len(part) % ALIGNED
        self.parts += [part, b"\0" * padding]
        self.size += len(part) + padding
        return begin, len(part)


class Reader:
    def __init__(self, numbers: bytearray, shared: Sequence[Any]) -> None:
        self.numbers, self.shared = numbers, shared

    def value(self, tree: Any) -> Any:
        if isinstance(tree, list):
            return [self.value(one) for one in tree]
        if not isinstance(tree, dict):
            return tree
        ((kind, held),) = tree.items()
        if kind == "shared":
            return self.shared[held]
        if kind == "tuple":
            return tuple(self.value(one) for one in held)
        if kind == "dict":
            return {self.value(key): self.value(one) for key, one in held}
        if kind == "record":
            module, name, values = held
            return record(module, name)(**{key: self.value(one) for key, one in values.items()})
        name, shape, begin, size = held
        if kind == "tensor":
            return self.tensor(name, shape, begin, size)
        part = memoryview(self.numbers)[begin : begin + size]
        if kind == "image":
            return Image.frombytes(name, tuple(shape), bytes(part))
        array = np.frombuffer(part, np.dtype(name)).reshape(shape)
        return array if kind == "array" else array[()]

    def tensor(self, name: str, shape: list[int], begin: int, size: int) -> Tensor:
        dtype = vars(torch)[name]
        if size == 0:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self.numbers, dtype=torch.uint8, count=size, offset=begin).view(dtype).view(shape)


def record(module: str, name: str) -> type[Any]:
    """A dataclass of a module that is imported. Raises ValueError for anything else."""
    kind = vars(sys.modules[module])[name] if module in sys.modules else None
    if not (isinstance(kind, type) and is_dataclass(kind)):
        raise ValueError(f"{module}:{name} is no record that is known here")
    return kind

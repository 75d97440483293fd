"""Checksums of tensors, by which a trainer and its engines compare what they have.

A checksum is a sum over the elements, of their bits times an odd number that belongs to the element's place. So it can
be had part by part, from wherever the parts lie, and over the processes that share a tensor; and it tells where an
element lies, so that a transposed tensor has another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

CHUNK = 1 << 22  # elements that are looked at together
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
WRAP = 1 << 64
HELD = "held"  # read from the memory that the engine computes with
PACKED = "packed"  # read when it came; the engine computes with a copy in a layout of its own


@dataclass(frozen=True)
class Checksum:
    """state: of a tensor in an engine, HELD or PACKED."""

    value: int  # modulo 2^64
    count: int  # elements
    state: str = HELD

    def __add__(self, other: Checksum) -> Checksum:
        state = HELD if self.state == other.state == HELD else PACKED
        return Checksum((self.value + other.value) % WRAP, self.count + other.count, state)

    def is_of(self, whole: Checksum) -> bool:
        """Whether this is that of the whole tensor, or of it several times, as processes with equal parts have it."""
        times, rest = divmod(self.count, whole.count)
        return rest == 0 and times > 0 and self.value == times * whole.value % WRAP


def checksum(values: Tensor, place: tuple[int, Sequence[int]] | None = None, state: str = HELD) -> Checksum:
    """Of a tensor, or of a part of one. place: the part's first element, and its strides, in the flattened whole."""
    first, strides = place or (0, row_strides(values.shape))
    if values.ndim == 0:
        values, strides = values[None], (1,)
    total, rows = 0, max(1, CHUNK // max(1, values[:1].numel()))
    for start in range(0, len(values), rows):
        part = values[start : start + rows]
        places = torch.full((), first + start * strides[0], device=values.device)
        for dimension, (size, stride) in enumerate(zip(part.shape, strides, strict=True)):
            steps = stride * torch.arange(size, device=values.device)
            places = places + steps.view(-1, *[1] * (values.ndim - 1 - dimension))
        bits = part.contiguous().view(BITS[values.element_size()]).long()
        total += int(((bits + 1) * _weight(places)).sum())
    return Checksum(total % WRAP, values.numel(), state)


def _weight(places: Tensor) -> Tensor:
    """An odd number for each place; products wrap."""
    mixed = (places + 1) * 0x9E3779B97F4A7C1
    mixed = (mixed ^ (mixed >> 29)) * 0x3F58476D1CE4E5B9
    return (mixed ^ (mixed >> 32)) | 1


def row_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Of a contiguous tensor."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides))


class SentWeights:
    """What was given to engines."""

    def __init__(self) -> None:
        self.sent: dict[str, Checksum] = {}

    def recorded(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        self.sent = {}
        for name, value in weights:
            self.sent[name] = checksum(value.detach())
            yield name, value


@dataclass(frozen=True)
class Report:
    """What an engine says of its weights. blank: parameters that got nothing. misplaced: tensors that lie as they came,
    where its kernels read them in another layout."""

    tensors: dict[str, Checksum]
    blank: list[str] = field(default_factory=list)
    misplaced: list[str] = field(default_factory=list)


def report(parts: Sequence[Mapping[str, Any]]) -> Report:
    """Of an engine, from what each of its processes says; see `Arrival.arrived`."""
    found: dict[str, Checksum] = {}
    for part in parts:
        for name, (value, count, state) in part["tensors"].items():
            mine = Checksum(int(value) % WRAP, int(count), str(state))
            found[name] = found[name] + mine if name in found else mine
    blank, misplaced = ({str(name) for part in parts for name in part[key]} for key in ("blank", "misplaced"))
    return Report(found, sorted(blank), sorted(misplaced))


def absent(sent: Mapping[str, Checksum], found: Mapping[str, Checksum]) -> list[str]:
    """Names of tensors that the engine did not take. A tied one was taken under its other name."""
    taken = {(sent[name].value, sent[name].count) for name in found if name in sent}
    return [name for name, own in sent.items() if name not in found and (own.value, own.count) not in taken]


def differing(sent: Mapping[str, Checksum], found: Mapping[str, Checksum]) -> list[str]:
    """Names of tensors that the engine has otherwise than they were sent."""
    return [name for name, own in found.items() if name not in sent or not own.is_of(sent[name])]

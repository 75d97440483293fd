"""Checksums of tensors, by which a trainer and its engines compare their weights.

A checksum is the sum over all elements of their bits times an odd number that depends on the element's position. So it
can be added up over parts of a tensor, also of several processes, and a transposed tensor has another checksum.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

CHUNK = 1 << 22  # elements that are summed together
CACHED = 1 << 18  # the same on a CPU; so many fit into its cache
BLOCK = 1 << 14  # elements of a block; all blocks share the weights of indices in a block
# Integer types by bytes of an element.
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
WRAP = 1 << 64  # checksums are modulo 2^64
HELD = "held"  # state of a checksum: computed from the memory that the engine uses
WATCHES = "mmrl_checksums"  # key of vLLM's additional configuration: whether engines compute checksums
PACKED = "packed"  # state of a checksum: computed on arrival; the engine uses a copy in another layout


@dataclass(frozen=True)
class Checksum:
    """The checksum of a tensor. state: HELD or PACKED, for tensors in an engine."""

    value: int  # modulo 2^64
    count: int  # number of elements
    state: str = HELD

    def __add__(self, other: Checksum) -> Checksum:
        state = HELD if self.state == other.state == HELD else PACKED
        return Checksum((self.value + other.value) % WRAP, self.count + other.count, state)

    def is_of(self, whole: Checksum) -> bool:
        """Returns whether this is the checksum of the tensor `whole`, or a multiple of it, as of several processes that
        all have the same tensor."""
        times, remainder = divmod(self.count, whole.count)
        return remainder == 0 and times > 0 and self.value == times * whole.value % WRAP


def checksum(values: Tensor, view: tuple[int, Sequence[int]] | None = None, state: str = HELD) -> Checksum:
    """Computes the checksum of a tensor, or of a part of one, on its device.

    view: for a part, the offset of its first element and its strides in the flattened tensor. state: is
    stored with the result.
    """
    first, strides = view or (0, row_strides(values.shape))
    if values.numel() == 0:
        return Checksum(0, 0, state)
    if tuple(strides) == row_strides(values.shape) or values.numel() == 1:
        total = _contiguous_sum(values.contiguous().flatten(), first)
    else:
        total = _strided_sum(values, first, strides)
    return Checksum(int(total) % WRAP, values.numel(), state)


def _contiguous_sum(values: Tensor, first: int) -> Tensor:
    """Returns the checksum of contiguous elements [element], an int64 scalar: the sum of (bits of the element + 1) x
    weight of its block x weight of its index in the block, modulo 2^64. first: the index of the first element in the
    flattened tensor."""
    bits, total = values.view(BITS[values.element_size()]), torch.zeros((), dtype=torch.int64, device=values.device)
    index_weights = _weight(torch.arange(BLOCK, device=values.device))
    head = min(len(bits), -first % BLOCK)  # elements before the first full block
    blocks = (len(bits) - head) // BLOCK
    # the elements before the first and after the last full block
    for start, stop in ((0, head), (head + blocks * BLOCK, len(bits))):
        if start < stop:
            block, offset = divmod(first + start, BLOCK)
            # + 1: elements of value 0 count too
            block_sum = ((bits[start:stop].long() + 1) * index_weights[offset : offset + stop - start]).sum()
            total = total + block_sum * _weight(torch.tensor(block, device=values.device))
    whole = bits[head : head + blocks * BLOCK].view(blocks, BLOCK)
    # blocks at a time, to limit memory, and on a CPU to stay in its cache
    rows = (CHUNK if values.is_cuda else CACHED) // BLOCK
    for start in range(0, blocks, rows):
        part = whole[start : start + rows]
        block_weights = _weight(torch.arange(len(part), device=values.device) + (first + head) // BLOCK + start)
        total = total + (((part.long() + 1) * index_weights).sum(1) * block_weights).sum()
    return total


def _strided_sum(values: Tensor, first: int, strides: Sequence[int]) -> Tensor:
    """Returns the checksum of `_contiguous_sum` for a part whose elements are not contiguous, an int64 scalar.

    values: the part. Its element at index i is element first + sum(i * strides) of the flattened tensor.
    """
    total, rows = torch.zeros((), dtype=torch.int64, device=values.device), max(1, CHUNK // max(1, values[:1].numel()))
    for start in range(0, len(values), rows):
        part = values[start : start + rows]
        positions = torch.full((), first + start * strides[0], device=values.device)
        for dimension, (size, stride) in enumerate(zip(part.shape, strides, strict=True)):
            steps = stride * torch.arange(size, device=values.device)
            positions = positions + steps.view(-1, *[1] * (values.ndim - 1 - dimension))
        bits = part.contiguous().view(BITS[values.element_size()]).long()
        weights = _weight(positions % BLOCK) * _weight(positions // BLOCK)
        total = total + ((bits + 1) * weights).sum()
    return total


def _weight(numbers: Tensor) -> Tensor:
    """Returns a pseudo-random odd number for each number, int64 with overflow. The weight of a position is the product
    of the weights of its block and of its index in the block."""
    # constants of the kind that splitmix64 uses to mix bits
    mixed = (numbers + 1) * 0x9E3779B97F4A7C1
    mixed = (mixed ^ (mixed >> 29)) * 0x3F58476D1CE4E5B9
    return (mixed ^ (mixed >> 32)) | 1


def row_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides of a contiguous tensor, in elements."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides))


class SentWeights:
    """Checksums of the weights that were sent to engines."""

    def __init__(self) -> None:
        self.sent: dict[str, Checksum] = {}

    def recorded(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yields the weights unchanged, and stores the checksum of each in `sent`."""
        self.sent = {}
        for name, value in weights:
            self.sent[name] = checksum(value.detach())
            yield name, value


@dataclass(frozen=True)
class Report:
    """An engine's report on its weights. tensors: checksums by name. blank: parameters that no weights were written to.
    misplaced: tensors in another layout than the engine's kernels read."""

    tensors: dict[str, Checksum]
    blank: list[str] = field(default_factory=list)
    misplaced: list[str] = field(default_factory=list)


def report(parts: Sequence[Mapping[str, Any]]) -> Report:
    """Merges the reports of an engine's processes, see `Arrival.arrived`."""
    tensors: dict[str, Checksum] = {}
    for part in parts:
        for name, (value, count, state) in part["tensors"].items():
            local = Checksum(int(value) % WRAP, int(count), str(state))
            tensors[name] = tensors[name] + local if name in tensors else local
    blank, misplaced = ({str(name) for part in parts for name in part[key]} for key in ("blank", "misplaced"))
    return Report(tensors, sorted(blank), sorted(misplaced))


def absent(sent: Mapping[str, Checksum], received: Mapping[str, Checksum]) -> list[str]:
    """Returns the names of sent tensors that the engine did not receive. A tied tensor may have been received under its
    other name."""
    taken = {(sent[name].value, sent[name].count) for name in received if name in sent}
    return [name for name, entry in sent.items() if name not in received and (entry.value, entry.count) not in taken]


def differing(sent: Mapping[str, Checksum], received: Mapping[str, Checksum]) -> list[str]:
    """Returns the names of tensors that have other values in the engine than were sent."""
    return [name for name, entry in received.items() if name not in sent or not entry.is_of(sent[name])]

"""Packs tensors into buckets, so that small ones are sent together. A header describes the tensors of a bucket."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SIZE = 64 * 2**20  # bytes of a bucket; a tensor that is larger has one of its own
ALIGNED = 16  # bytes; a tensor that begins at a multiple of it can be viewed as any dtype


@dataclass(frozen=True)
class Entry:
    """A tensor of a bucket."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """The tensor's bytes, without the gap that follows."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Bucket:
    """Several tensors in one block of bytes."""

    entries: Sequence[Entry]
    payload: Tensor  # [byte] uint8: the tensors one after the other, each from a multiple of ALIGNED on

    def header(self) -> str:
        """Returns a text that describes the tensors; `read_header` parses it."""
        return json.dumps([[e.name, str(e.dtype).removeprefix("torch."), e.shape] for e in self.entries])


def read_header(text: str) -> list[Entry]:
    """Parses the text of `Bucket.header`."""
    return [Entry(name, getattr(torch, dtype), tuple(shape)) for name, dtype, shape in json.loads(text)]


def packed(weights: Iterable[tuple[str, Tensor]], size: int = SIZE) -> Iterator[Bucket]:
    """Yields buckets of about `size` bytes, in the order of `weights`, which are consumed lazily."""
    entries: list[Entry] = []
    parts: list[Tensor] = []
    filled = 0
    for name, value in weights:
        entry = Entry(name, value.dtype, tuple(value.shape))
        if entries and filled + padded_bytes(entry) > size:
            yield Bucket(entries, torch.cat(parts))
            entries, parts, filled = [], [], 0
        raw = value.detach().contiguous().view(-1).view(torch.uint8)
        entries.append(entry)
        parts += [raw, raw.new_zeros(padded_bytes(entry) - entry.bytes)]
        filled += padded_bytes(entry)
    if entries:
        yield Bucket(entries, torch.cat(parts))


def unpacked(entries: Sequence[Entry], payload: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yields names and tensors of a bucket, as views of its payload."""
    start = 0
    for entry in entries:
        yield entry.name, payload[start : start + entry.bytes].view(entry.dtype).view(entry.shape)
        start += padded_bytes(entry)


def padded_bytes(entry: Entry) -> int:
    """Returns the bytes from the start of a tensor to the start of the next one."""
    return -(-entry.bytes // ALIGNED) * ALIGNED

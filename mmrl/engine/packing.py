"""Messages between ranks: values as JSON and the bytes of their tensors. Decoding a message never runs code of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mmrl.children.frames import decode, encode
from mmrl.errors import UserError

MAX_MESSAGE = 2**34  # bytes; more than the rollouts of a step take, so that a larger size is a damaged message


def pack(value: object, instead: str | None = None) -> Tensor:
    """Encodes a value as a message, [byte] uint8. instead: a setting with which nothing has to be sent, for the error.
    Raises UserError for what cannot be sent, such as an open file in a prompt's metadata."""
    try:
        message = encode(value, repeats=True)
    except TypeError as error:
        hint = "; use numbers, texts, arrays or images" if instead is None else f"; set {instead}"
        raise UserError(
            f"a value for another rank, such as a prompt's metadata, holds {error}, which cannot be sent{hint}"
        ) from None
    return torch.frombuffer(bytearray(message), dtype=torch.uint8)


def unpack(message: Tensor) -> Any:
    """Decodes a message of `pack`, [byte] uint8. Raises ValueError for anything else."""
    return decode(bytearray(message.numpy()), repeats=True)


def check_sizes(sizes: Sequence[int]) -> None:
    """Raises UserError for a message of more than MAX_MESSAGE bytes, before memory is allocated. sizes: bytes, by
    rank."""
    for rank, size in enumerate(sizes):
        if not 0 <= size <= MAX_MESSAGE:
            raise UserError(
                f"rank {rank} announces a message of {size} bytes, but the limit is {MAX_MESSAGE}; start the run again"
            )


def gather_messages(message: Tensor, world: int, group: dist.ProcessGroup | None) -> list[Tensor]:
    """Returns the messages of all ranks, [byte] uint8 each, in rank order. A collective."""
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([len(message)]), group=group)
    lengths = [int(size) for size in sizes]
    check_sizes(lengths)
    outgoing = torch.zeros(max(lengths), dtype=torch.uint8)  # padded: all_gather needs equal sizes
    outgoing[: len(message)] = message
    received = [torch.empty_like(outgoing) for _ in range(world)]
    dist.all_gather(received, outgoing, group=group)
    return [part[:length] for part, length in zip(received, lengths, strict=True)]


def exchange_messages(messages: Sequence[Tensor], group: dist.ProcessGroup | None) -> list[Tensor]:
    """Sends rank i the message messages[i]. Returns the messages that all ranks sent to this one, in rank order. A
    collective."""
    sizes = [len(message) for message in messages]
    incoming_sizes = torch.zeros(len(sizes), dtype=torch.int64)
    dist.all_to_all_single(incoming_sizes, torch.tensor(sizes), group=group)
    check_sizes(incoming_sizes.tolist())
    received = torch.zeros(int(incoming_sizes.sum()), dtype=torch.uint8)
    dist.all_to_all_single(received, torch.cat(list(messages)), incoming_sizes.tolist(), sizes, group=group)
    return list(received.split(incoming_sizes.tolist()))

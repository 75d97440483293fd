"""Values that ranks send each other, as JSON and the bytes of tensors: what comes is read, and never runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mmrl.children.frames import decode, encode
from mmrl.errors import UserError

LARGEST = 2**34  # bytes of one message; more than rollouts of a step take, less than a number that is damaged asks for


def pack(value: object, instead: str | None = None) -> Tensor:
    """Returns the message of a value, [byte] uint8. Raises UserError for what can not be sent, such as an open file in
    a prompt's metadata; it names `instead`, the setting with which nothing is sent."""
    try:
        message = encode(value, repeats=True)
    except TypeError as error:
        hint = "" if instead is None else f"; set {instead}"
        raise UserError(
            f"a value for another rank, such as a prompt's metadata, holds {error}, which can not be sent{hint}"
        ) from None
    return torch.frombuffer(bytearray(message), dtype=torch.uint8)


def unpack(message: Tensor) -> Any:
    """Returns the value of a message [byte]. Raises ValueError for anything that `pack` has not made."""
    return decode(bytearray(message.numpy()), repeats=True)


def check_sizes(sizes: Sequence[int]) -> None:
    """Raises UserError for a message that no rank sends, before there is memory for it. sizes: in bytes, by rank."""
    for rank, size in enumerate(sizes):
        if not 0 <= size <= LARGEST:
            raise UserError(f"rank {rank} sends a message of {size} bytes, more than {LARGEST} that ranks may")


def gather_messages(message: Tensor, world: int, group: dist.ProcessGroup | None) -> list[Tensor]:
    """Returns the messages of all ranks, in rank order. A collective."""
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([len(message)]), group=group)
    lengths = [int(size) for size in sizes]
    check_sizes(lengths)
    outgoing = torch.zeros(max(lengths), dtype=torch.uint8)
    outgoing[: len(message)] = message
    received = [torch.empty_like(outgoing) for _ in range(world)]
    dist.all_gather(received, outgoing, group=group)
    return [part[:length] for part, length in zip(received, lengths, strict=True)]


def exchange_messages(messages: Sequence[Tensor], group: dist.ProcessGroup | None) -> list[Tensor]:
    """Sends each rank its message, and returns those of all ranks for this one, in rank order. A collective."""
    sizes = [len(message) for message in messages]
    coming = torch.zeros(len(sizes), dtype=torch.int64)
    dist.all_to_all_single(coming, torch.tensor(sizes), group=group)
    check_sizes(coming.tolist())
    received = torch.zeros(int(coming.sum()), dtype=torch.uint8)
    dist.all_to_all_single(received, torch.cat(list(messages)), coming.tolist(), sizes, group=group)
    return list(received.split(coming.tolist()))

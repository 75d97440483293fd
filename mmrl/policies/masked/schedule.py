"""How many places of a response are filled in each step, and which of them may be."""

from __future__ import annotations

from typing import NamedTuple


class Step(NamedTuple):
    """`number` of the places [start, stop) that are still empty are filled."""

    start: int
    stop: int
    number: int


def schedule(length: int, steps: int | None = None, block: int | None = None) -> list[Step]:
    """`steps` steps (None: one a place) for responses of `length` places, block by block (None: all at once).

    Steps are shared out among blocks, and places among the steps of a block, as evenly as can be; what is left over
    comes first. Raises ValueError for steps that leave a block or a step without anything to do.
    """
    blocks = _shared(length, -(-length // block)) if block is not None else [length]
    steps = length if steps is None else steps
    if not len(blocks) <= steps <= length:
        raise ValueError(
            f"unmasking.steps={steps} do not fill rollout.response_length={length} places in {len(blocks)} "
            f"block{'s' if len(blocks) > 1 else ''}; use {len(blocks)} to {length}"
        )
    found, start = [], 0
    for size, own in zip(blocks, _shared(steps, len(blocks)), strict=True):
        found += [Step(start, start + size, count) for count in _shared(size, own)]
        start += size
    return found


def _shared(total: int, parts: int) -> list[int]:
    return [total // parts + (i < total % parts) for i in range(parts)]

"""The unmasking schedule: how many masked positions each step fills, and in which block of the response."""

from __future__ import annotations

import math
from typing import NamedTuple


class UnmaskingStep(NamedTuple):
    """A step that fills `number` of the masked positions in [start, stop)."""

    start: int
    stop: int
    number: int


def schedule(
    length: int,
    steps: int | None = None,
    block: int | None = None,
    *,
    names: tuple[str, str] = ("unmasking.steps", "rollout.response_length"),
) -> list[UnmaskingStep]:
    """Plans the steps that fill a response of `length` positions.

    steps: number of steps; None: one per position. block: positions of a block, blocks are filled one after the other;
    None: a single block. Steps are divided evenly among blocks, and positions among the steps of a block; the first
    ones get the remainder. names: the keys of steps and length, for messages. Raises ValueError if there are fewer
    steps than blocks, or more than positions.
    """
    blocks = _split_evenly(length, math.ceil(length / block)) if block is not None else [length]
    steps = length if steps is None else steps
    if not len(blocks) <= steps <= length:
        raise ValueError(
            f"{names[0]}={steps} does not fit {names[1]}={length} positions in {len(blocks)} "
            f"block{'s' if len(blocks) > 1 else ''}; set {names[0]} to a number from {len(blocks)} to {length}"
        )
    schedule_steps, start = [], 0
    for size, block_steps in zip(blocks, _split_evenly(steps, len(blocks)), strict=True):
        for number in _split_evenly(size, block_steps):
            schedule_steps.append(UnmaskingStep(start, start + size, number))
        start += size
    return schedule_steps


def text_and_image_schedule(
    text_length: int, image_length: int, text_steps: int | None, image_steps: int | None, block: int | None
) -> list[UnmaskingStep]:
    """Plans the steps of a response of text positions, which may be 0, followed by image positions. The steps of the
    text come first. Raises ValueError as `schedule` does."""
    names = ("unmasking.reasoning_steps", "rollout.reasoning_length")
    text = schedule(text_length, text_steps, block, names=names) if text_length else []
    image = [
        UnmaskingStep(text_length + step.start, text_length + step.stop, step.number)
        for step in schedule(image_length, image_steps, block)
    ]
    return [*text, *image]


def _split_evenly(total: int, parts: int) -> list[int]:
    """Returns `parts` numbers with the sum `total`, which differ by at most 1, larger ones first."""
    return [total // parts + (i < total % parts) for i in range(parts)]

"""The unmasking schedule: how many positions of a response are filled in each step, and which of them may be."""

from __future__ import annotations

from typing import NamedTuple


class UnmaskingStep(NamedTuple):
    """A step that fills `number` of the positions [start, stop) that are still empty."""

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
    """Plans `steps` steps (None: one a position) for responses of `length` positions, block by block (None: all at
    once).

    Steps are shared out among blocks, and positions among the steps of a block, as evenly as can be; what is left over
    comes first. names: the keys of steps and length, for messages. Raises ValueError for steps that leave a block or a
    step without anything to do.
    """
    blocks = _shared(length, -(-length // block)) if block is not None else [length]
    steps = length if steps is None else steps
    if not len(blocks) <= steps <= length:
        raise ValueError(
            f"{names[0]}={steps} do not fill {names[1]}={length} positions in {len(blocks)} "
            f"block{'s' if len(blocks) > 1 else ''}; use {len(blocks)} to {length}"
        )
    planned, start = [], 0
    for size, block_steps in zip(blocks, _shared(steps, len(blocks)), strict=True):
        planned += [UnmaskingStep(start, start + size, count) for count in _shared(size, block_steps)]
        start += size
    return planned


def in_parts(
    text: int, image: int, text_steps: int | None, steps: int | None, block: int | None
) -> list[UnmaskingStep]:
    """Plans the schedule of `text` positions and behind them that of `image` positions, each with steps and blocks of
    its own; `text` may be 0. Raises ValueError as `schedule`."""
    names = ("unmasking.reasoning_steps", "rollout.reasoning_length")
    first = schedule(text, text_steps, block, names=names) if text else []
    then = schedule(image, steps, block)
    return [*first, *(UnmaskingStep(text + step.start, text + step.stop, step.number) for step in then)]


def _shared(total: int, parts: int) -> list[int]:
    return [total // parts + (i < total % parts) for i in range(parts)]

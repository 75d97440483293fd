"""Probes of gold boxes: their coordinates must be in the frame (size and orientation) of the image that the model sees.
A gold is the reference answer of a row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mmrl.preflight.alarms import Alarm, abbreviate
from mmrl.rewards.parsing.boxes import gold_boxes, gold_points
from mmrl.rewards.settings import RewardSpec
from mmrl.rollouts import Prompt

BOX_REWARDS = frozenset(
    {
        *("box_iou", "box_giou", "boxes_matched", "labelled_boxes", "average_precision"),
        *("point_inside", "region_iou"),
    }
)


def probe_boxes(
    prompts: Sequence[Prompt], specs: Sequence[RewardSpec], processor: Mapping[str, Any], key: str
) -> Iterator[Alarm]:
    """Yields alarms for golds in 0 .. 1 that a reward reads as pixels, for boxes outside of their image, and for a
    reward's option `resize` that differs from the image processor's.

    specs: the rewards. processor: the options in model.processor. key: the configuration key that holds the rewards.
    """
    for spec in specs:
        if spec.name not in BOX_REWARDS:
            continue
        if spec.options.get("answers", "pixels") == "pixels":
            yield from _probe_frames(spec, prompts, key)
        for option, value in (spec.options.get("resize") or {}).items():
            if option in processor and processor[option] != value:
                yield Alarm(
                    "rewards",
                    "warned",
                    f"{key}: {spec.name} has resize.{option}={value}, but model.processor.{option} is "
                    f"{processor[option]}: boxes would be scored at another image size than the model sees; make both "
                    "equal",
                )


def _probe_frames(spec: RewardSpec, prompts: Sequence[Prompt], key: str) -> Iterator[Alarm]:
    """Yields alarms for gold boxes in 0..1 that are read as pixels, and for boxes outside of their image."""
    rows_with_boxes = [
        (prompt, coordinates)
        for prompt in prompts
        if prompt.images and len(coordinates := _coordinates(prompt.answer)) >= 2
    ]
    in_unit_frame = [
        prompt for prompt, coordinates in rows_with_boxes if max(coordinates) <= 1 and min(prompt.images[0].size) > 2
    ]
    if in_unit_frame:
        yield Alarm(
            "rewards",
            "warned",
            f"{key}: {spec.name} reads golds as pixels, but those of {len(in_unit_frame)} of {len(rows_with_boxes)} "
            f"rows lie in 0 .. 1, such as {abbreviate(prompt.id for prompt in in_unit_frame)}; set its "
            "options.answers=unit",
        )
    outside = [
        prompt
        for prompt, coordinates in rows_with_boxes
        if prompt not in in_unit_frame and _lies_outside(prompt, coordinates)
    ]
    if outside:
        width, height = outside[0].images[0].size
        yield Alarm(
            "rewards",
            "warned",
            f"{key}: the gold box of {abbreviate(prompt.id for prompt in outside)} lies outside of its image, which "
            f"has {width} x {height} pixels once it is turned upright; write boxes in that frame",
        )


def _lies_outside(prompt: Prompt, coordinates: Sequence[float]) -> bool:
    """Returns whether coordinates [x, y, x, y, ...] in pixels exceed the prompt's first image."""
    width, height = prompt.images[0].size
    return max(coordinates[0::2]) > width or max(coordinates[1::2]) > height or min(coordinates) < 0


def _coordinates(gold: Any) -> list[float]:
    """Returns the coordinates [x, y, x, y, ...] of all boxes or points in a gold, parsed as rewards parse it."""
    return [coordinate for shape in gold_boxes(gold) or gold_points(gold) or [] for coordinate in shape]

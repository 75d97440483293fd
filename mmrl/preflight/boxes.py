"""Gold boxes in the frame of the image that the model sees."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mmrl.preflight.alarms import Alarm, some
from mmrl.rewards.parsing.boxes import gold_boxes, gold_points
from mmrl.rewards.settings import RewardSpec
from mmrl.rollouts import Prompt

BOXED = frozenset(
    {
        *("box_iou", "box_giou", "boxes_matched", "labelled_boxes", "average_precision"),
        *("point_inside", "region_iou"),
    }
)


def probe_boxes(
    prompts: Sequence[Prompt], specs: Sequence[RewardSpec], processor: Mapping[str, Any], key: str
) -> Iterator[Alarm]:
    """Finds golds in 0 .. 1 where pixels are asked, boxes outside of their image, and a `resize` that is not the
    processor's. processor: the options of model.processor."""
    for spec in specs:
        if spec.name not in BOXED:
            continue
        if spec.options.get("answers", "pixels") == "pixels":
            yield from _frames(spec, prompts, key)
        for option, value in (spec.options.get("resize") or {}).items():
            if option in processor and processor[option] != value:
                yield Alarm(
                    "rewards",
                    "warned",
                    f"{key}: {spec.name} has resize.{option}={value}, but model.processor.{option} is "
                    f"{processor[option]}: boxes are scored in another frame than the model sees",
                )


def _frames(spec: RewardSpec, prompts: Sequence[Prompt], key: str) -> Iterator[Alarm]:
    """Yields alarms for gold boxes in 0..1 that are read as pixels, and for boxes outside of their image."""
    boxed = [(prompt, numbers) for prompt in prompts if prompt.images and len(numbers := _numbers(prompt.answer)) >= 2]
    shares = [prompt for prompt, numbers in boxed if max(numbers) <= 1 and min(prompt.images[0].size) > 2]
    if shares:
        yield Alarm(
            "rewards",
            "warned",
            f"{key}: {spec.name} reads golds as pixels, but those of {len(shares)} of {len(boxed)} rows lie in 0 .. 1, "
            f"such as {some(prompt.id for prompt in shares)}; set its options.answers=unit",
        )
    outside = [prompt for prompt, numbers in boxed if prompt not in shares and _beyond(prompt, numbers)]
    if outside:
        width, height = outside[0].images[0].size
        yield Alarm(
            "rewards",
            "warned",
            f"{key}: the gold box of {some(prompt.id for prompt in outside)} lies outside of its image, which is "
            f"{width} x {height} upright, as viewers show it; write boxes in that frame",
        )


def _beyond(prompt: Prompt, numbers: Sequence[float]) -> bool:
    width, height = prompt.images[0].size
    return max(numbers[0::2]) > width or max(numbers[1::2]) > height or min(numbers) < 0


def _numbers(gold: Any) -> list[float]:
    """Returns x, y, x, y, ... of the boxes or points of a gold, read as rewards read it."""
    return [number for shape in gold_boxes(gold) or gold_points(gold) or [] for number in shape]

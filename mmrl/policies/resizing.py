"""Sizes that a processor gives to images."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from mmrl.policies.tokenizers import Processor


@runtime_checkable
class ImageProcessing(Protocol):
    """A processor with a part for images."""

    image_processor: Any


def resize_of(processor: Processor) -> dict[str, int] | None:
    """Returns factor, min_pixels and max_pixels of a processor that resizes as Qwen2-VL's does, to sides that are
    multiples of patch_size x merge_size and an area between two bounds; None for others."""
    if not isinstance(processor, ImageProcessing):
        return None
    settings = processor.image_processor.to_dict()
    size = settings.get("size") or {}
    if not {"patch_size", "merge_size"} <= set(settings) or not {"shortest_edge", "longest_edge"} <= set(size):
        return None
    return {
        "factor": settings["patch_size"] * settings["merge_size"],
        "min_pixels": size["shortest_edge"],
        "max_pixels": size["longest_edge"],
    }

"""Image sizes after a processor resized them."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from mmrl.policies.tokenizers import Processor


@runtime_checkable
class ImageProcessing(Protocol):
    """A processor that handles images."""

    image_processor: Any


def resize_options(processor: Processor) -> dict[str, int] | None:
    """Returns "factor", "min_pixels" and "max_pixels" of a processor that resizes images as Qwen2-VL does: to sides
    that are multiples of factor = patch_size x merge_size, and an area in [min_pixels, max_pixels]. Returns None for
    other processors."""
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

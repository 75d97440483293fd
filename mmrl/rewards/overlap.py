"""Overlap of boxes.

In plain numbers: `torchvision.ops` computes the same for tensors, but takes seconds to import in every process.
"""

from __future__ import annotations

from collections.abc import Iterable

Box = tuple[float, float, float, float]  # left, top, right, bottom


def to_box(numbers: Iterable[float | str]) -> Box | None:
    """Returns four numbers as a box; None if it has no area."""
    x1, y1, x2, y2 = map(float, numbers)
    return (x1, y1, x2, y2) if x1 < x2 and y1 < y2 else None


def iou(a: Box, b: Box) -> float:
    """Returns the intersection over union of two boxes, 0 to 1."""
    intersection, union = _intersection_and_union(a, b)
    return intersection / union


def giou(a: Box, b: Box) -> float:
    """Returns the generalised IoU of two boxes, -1 to 1 (Rezatofighi et al. 2019, arXiv:1902.09630): IoU minus the
    share of the smallest enclosing box that lies in neither."""
    intersection, union = _intersection_and_union(a, b)
    enclosing = _area((min(a[0], b[0]), min(a[1], b[1]), max(a[2], b[2]), max(a[3], b[3])))
    return intersection / union - (enclosing - union) / enclosing


def _intersection_and_union(a: Box, b: Box) -> tuple[float, float]:
    """Returns the areas of the intersection and of the union."""
    intersection = _area((max(a[0], b[0]), max(a[1], b[1]), min(a[2], b[2]), min(a[3], b[3])))
    return intersection, _area(a) + _area(b) - intersection


def _area(box: Box) -> float:
    return max(0.0, box[2] - box[0]) * max(0.0, box[3] - box[1])

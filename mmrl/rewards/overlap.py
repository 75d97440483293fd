"""Boxes and their overlap.

Plain numbers: `torchvision.ops`, which computes the same of tensors, takes seconds to import, in every process that
scores.
"""

from __future__ import annotations

from collections.abc import Iterable

Box = tuple[float, float, float, float]  # left, top, right, bottom


def proper(numbers: Iterable[float | str]) -> Box | None:
    """Returns four numbers as a box; None where it has no area."""
    x1, y1, x2, y2 = map(float, numbers)
    return (x1, y1, x2, y2) if x1 < x2 and y1 < y2 else None


def iou(a: Box, b: Box) -> float:
    """Intersection over union, 0 to 1."""
    shared, union = _shared_and_union(a, b)
    return shared / union


def giou(a: Box, b: Box) -> float:
    """The generalised intersection over union, -1 to 1 (Rezatofighi et al. 2019, arXiv:1902.09630): less the share of
    the smallest box around both that belongs to neither."""
    shared, union = _shared_and_union(a, b)
    hull = _area((min(a[0], b[0]), min(a[1], b[1]), max(a[2], b[2]), max(a[3], b[3])))
    return shared / union - (hull - union) / hull


def _shared_and_union(a: Box, b: Box) -> tuple[float, float]:
    shared = _area((max(a[0], b[0]), max(a[1], b[1]), min(a[2], b[2]), min(a[3], b[3])))
    return shared, _area(a) + _area(b) - shared


def _area(box: Box) -> float:
    return max(0.0, box[2] - box[0]) * max(0.0, box[3] - box[1])

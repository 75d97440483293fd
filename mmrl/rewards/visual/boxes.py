"""Several boxes: matched, labelled, ranked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmrl.rewards.matching import best_assignment, soft_assignment
from mmrl.rewards.overlap import Box, iou, proper
from mmrl.rewards.types import Reward
from mmrl.rewards.verifiers import extract_answer
from mmrl.rewards.visual.coordinates import Coordinates, boxes_in, objects_in
from mmrl.rollouts import Sample

Labelled = tuple[str, Box]
THRESHOLDS = tuple(0.5 + 0.05 * i for i in range(10))
MOST = 64  # boxes of a response that are matched; more of them only count as too many
KEYS = ("bbox_2d", "bbox", "box")


def boxes_matched(
    *,
    match: str = "hungarian",
    epsilon: float = 0.05,
    coordinates: str = "pixels",
    answers: str = "pixels",
    resize: Mapping[str, int] | None = None,
) -> Reward:
    """Intersection over union, 0 to 1, of all boxes of the answer and all gold boxes, each matched with at most one of
    the other side; the sum over the number of the larger side, so that boxes too many and too few both cost.

    match: hungarian takes the best pairs, sinkhorn weighs all pairs (entropic optimal transport with `epsilon`), so
    that a box that is near two gets something from both. coordinates, answers: of the response and of the gold boxes,
    see `mmrl.rewards.visual.coordinates`. The gold answer is a list of boxes; None where it is not.
    """
    if match not in ("hungarian", "sinkhorn"):
        raise ValueError(f"match must be hungarian or sinkhorn, not {match!r}")
    if epsilon <= 0:
        raise ValueError(f"epsilon must be positive, not {epsilon}")
    spoken, given = Coordinates(coordinates, resize), Coordinates(answers)

    def reward(sample: Sample) -> float | None:
        golds = _gold(sample, given)
        if not golds:
            return None
        found = [proper(spoken.unit(box, sample)) for box in boxes_in(extract_answer(sample.response))]
        gains = [[0.0 if box is None else iou(box, gold) for gold in golds] for box in found[:MOST]]
        if not gains:
            return 0.0
        size = max(len(found), len(golds))
        if match == "hungarian":
            return sum(gains[r][c] for r, c in best_assignment(gains)) / size
        weights = soft_assignment(gains, epsilon)
        return sum(w * g for ws, gs in zip(weights, gains, strict=True) for w, g in zip(ws, gs, strict=True)) / size

    return reward


def labelled_boxes(
    *,
    threshold: float | None = None,
    whole_response: bool = False,
    coordinates: str = "pixels",
    answers: str = "pixels",
    resize: Mapping[str, int] | None = None,
) -> Reward:
    """Objects with a label and a box, matched with gold objects of the same label; the sum of intersections over unions
    over the number of the larger side. With `threshold` a pair counts 1 where it is reached and 0 elsewhere.

    The response holds JSON objects such as {"bbox_2d": [x1, y1, x2, y2], "label": "cat"}, in its answer, or anywhere
    with whole_response, so that steps of the reasoning can be pairs of labels and boxes. The gold answer is a list of
    such objects; None where it is not.
    """
    spoken, given = Coordinates(coordinates, resize), Coordinates(answers)

    def reward(sample: Sample) -> float | None:
        golds = _labelled(sample.prompt.answer, given, sample)
        if not golds:
            return None
        text = sample.response if whole_response else extract_answer(sample.response)
        found = _labelled(objects_in(text), spoken, sample) or []
        gains = [[iou(box, gold) if label == name else 0.0 for name, gold in golds] for label, box in found[:MOST]]
        matched = [gains[r][c] for r, c in best_assignment(gains)]
        if threshold is not None:
            matched = [float(value >= threshold) for value in matched]
        return sum(matched) / max(len(found), len(golds))

    return reward


def average_precision(
    *,
    thresholds: Sequence[float] = THRESHOLDS,
    coordinates: str = "pixels",
    answers: str = "pixels",
    resize: Mapping[str, int] | None = None,
) -> Reward:
    """Mean average precision, 0 to 1, over the labels and over `thresholds` of intersection over union, of labelled
    boxes as in `labelled_boxes`. They count in the order of their "score", highest first, or as they stand. A label
    that is not there has a precision of 0, so that naming all labels does not pay."""
    spoken, given = Coordinates(coordinates, resize), Coordinates(answers)

    def reward(sample: Sample) -> float | None:
        golds = _labelled(sample.prompt.answer, given, sample)
        if not golds:
            return None
        found = _labelled(_by_score(objects_in(extract_answer(sample.response))), spoken, sample) or []
        found = found[:MOST]
        labels = {label for label, _ in [*golds, *found]}
        values = [
            _precision([b for n, b in found if n == label], [b for n, b in golds if n == label], bar)
            for label in labels
            for bar in thresholds
        ]
        return sum(values) / len(values)

    return reward


def _precision(found: list[Box], golds: list[Box], bar: float) -> float:
    """The area under the precision-recall curve, precision made to fall (all-point interpolation)."""
    free, hits = list(golds), []
    for box in found:
        near = max(free, key=lambda gold: iou(box, gold), default=None)
        hit = near is not None and iou(box, near) >= bar
        if hit and near is not None:
            free.remove(near)
        hits.append(hit)
    if not golds:
        return 0.0
    precisions = [sum(hits[: i + 1]) / (i + 1) for i in range(len(hits))]
    return sum(max(precisions[i:]) for i in range(len(hits)) if hits[i]) / len(golds)


def _by_score(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    scored = [isinstance(o.get("score"), int | float) for o in objects]
    return sorted(objects, key=lambda o: -o["score"]) if objects and all(scored) else objects


def _gold(sample: Sample, given: Coordinates) -> list[Box]:
    answer = sample.prompt.answer
    rows = boxes_in(answer) if isinstance(answer, str) else answer
    if not isinstance(rows, list | tuple) or not rows:
        return []
    rows = rows if isinstance(rows[0], list | tuple) else [rows]
    boxes = [proper(given.unit(row, sample)) if len(row) == 4 else None for row in rows]
    return [] if None in boxes else [box for box in boxes if box is not None]


def _labelled(objects: Any, coordinates: Coordinates, sample: Sample) -> list[Labelled]:
    """Objects with a label and a box that has an area; others are left out."""
    found: list[Labelled] = []
    rows = objects_in(objects) if isinstance(objects, str) else objects
    for row in rows if isinstance(rows, list | tuple) else []:
        if isinstance(row, dict):
            box = next((row[key] for key in KEYS if key in row), None)
            numbers = isinstance(box, list | tuple) and len(box) == 4 and all(isinstance(n, int | float) for n in box)
            kept = proper(coordinates.unit(box, sample)) if numbers and box is not None else None
            if kept is not None and isinstance(row.get("label"), str):
                found.append((row["label"].strip().lower(), kept))
    return found

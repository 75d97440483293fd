"""Boxes: the last one, several matched, labelled, ranked.

`coordinates` and `answers` are the conventions of the response and of the gold boxes, see
`mmrl.rewards.visual.coordinates`; `resize` is for those that are "resized". Boxes have the forms of
`mmrl.rewards.parsing.boxes`, in the gold answer too. A gold answer of no box, [], is met by a response that says that
there is nothing ("[]", "none", "There is no cat"), and by neither boxes nor silence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mmrl.rewards.matching import best_assignment, soft_assignment
from mmrl.rewards.overlap import Box, giou, iou
from mmrl.rewards.parsing.boxes import gold_boxes, parse_boxes, parse_labelled_boxes, parse_objects, states_nothing
from mmrl.rewards.parsing.responses import extract_answer, full_response, without_thoughts
from mmrl.rewards.types import Reward
from mmrl.rewards.visual.coordinates import CoordinatePair
from mmrl.rollouts import Sample

Labelled = tuple[str, Box]
THRESHOLDS = tuple(0.5 + 0.05 * i for i in range(10))
MOST = 64  # boxes of a response that are matched; more of them only count as too many


def box_iou(
    *,
    threshold: float | None = None,
    coordinates: str = "pixels",
    answers: str = "pixels",
    resize: Mapping[str, int] | None = None,
) -> Reward:
    """Intersection over union, 0 to 1, of the last box of the answer and the best gold box.

    With `threshold` the reward is 1 where it is reached and 0 elsewhere. No box, or a box with no area, gets 0. The
    gold answer is one box or a list of them, [] where there is nothing to find; None where it is neither.
    """
    return _box_reward(iou, 0.0, threshold, CoordinatePair(coordinates, answers, resize))


def box_giou(
    *,
    threshold: float | None = None,
    coordinates: str = "pixels",
    answers: str = "pixels",
    resize: Mapping[str, int] | None = None,
) -> Reward:
    """`box_iou` with the generalised IoU, -1 to 1 (Rezatofighi et al. 2019, arXiv:1902.09630); no box gets -1."""
    return _box_reward(giou, -1.0, threshold, CoordinatePair(coordinates, answers, resize))


def _box_reward(
    overlap: Callable[[Box, Box], float], missing: float, threshold: float | None, pair: CoordinatePair
) -> Reward:
    """Returns the reward of the best `overlap` between the last box of the answer and a gold box; 1 or 0 by `threshold`
    where it is set. missing: the reward without a box. It is None where the gold is not a box."""

    def value(sample: Sample) -> float | None:
        golds = _gold(sample, pair)
        if golds is None:
            return None
        answer = extract_answer(full_response(sample))
        boxes = parse_boxes(answer) or parse_boxes(without_thoughts(full_response(sample)))
        if not golds:
            return 1.0 if not boxes and states_nothing(answer) else missing
        box = pair.response_box(boxes[-1], sample) if boxes else None
        return missing if box is None else max(overlap(box, gold) for gold in golds)

    def reward(sample: Sample) -> float | None:
        overlapping = value(sample)
        return overlapping if overlapping is None or threshold is None else float(overlapping >= threshold)

    return reward


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
    that a box that is near two gets something from both. The gold answer is a list of boxes, [] where there is nothing
    to find; None where it is not.
    """
    if match not in ("hungarian", "sinkhorn"):
        raise ValueError(f"match must be hungarian or sinkhorn, not {match!r}")
    if epsilon <= 0:
        raise ValueError(f"epsilon must be positive, not {epsilon}")
    pair = CoordinatePair(coordinates, answers, resize)

    def reward(sample: Sample) -> float | None:
        golds, answer = _gold(sample, pair), extract_answer(full_response(sample))
        if golds is None:
            return None
        numbers = parse_boxes(answer)
        if not golds or not numbers:
            return float(not golds and not numbers and states_nothing(answer))
        boxes = [pair.response_box(box, sample) for box in numbers[:MOST]]
        gains = [[0.0 if box is None else iou(box, gold) for gold in golds] for box in boxes]
        size = max(len(numbers), len(golds))
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
    such objects, [] where there is nothing to find; None where it is not.
    """
    pair = CoordinatePair(coordinates, answers, resize)

    def reward(sample: Sample) -> float | None:
        golds = _gold_labelled(sample, pair)
        if golds is None:
            return None
        text = sample.response if whole_response else extract_answer(full_response(sample))
        predicted = _labelled(text, pair, sample)
        if not golds:
            return _nothing(text)
        gains = [[iou(box, gold) if label == name else 0.0 for name, gold in golds] for label, box in predicted[:MOST]]
        matched = [gains[r][c] for r, c in best_assignment(gains)]
        if threshold is not None:
            matched = [float(value >= threshold) for value in matched]
        return sum(matched) / max(len(predicted), len(golds))

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
    that is not in the gold answer has a precision of 0, so that naming all labels does not pay."""
    pair = CoordinatePair(coordinates, answers, resize)

    def reward(sample: Sample) -> float | None:
        golds, answer = _gold_labelled(sample, pair), extract_answer(full_response(sample))
        if golds is None:
            return None
        if not golds:
            return _nothing(answer)
        predicted = _labelled(answer, pair, sample, ranked=True)[:MOST]
        labels = {label for label, _ in [*golds, *predicted]}
        values = [
            _precision([b for n, b in predicted if n == label], [b for n, b in golds if n == label], bar)
            for label in labels
            for bar in thresholds
        ]
        return sum(values) / len(values)

    return reward


def _precision(predicted: list[Box], golds: list[Box], bar: float) -> float:
    """Computes the area under the precision-recall curve with monotone precision (all-point interpolation)."""
    free, hits = list(golds), []
    for box in predicted:
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


def _gold(sample: Sample, pair: CoordinatePair) -> list[Box] | None:
    """The gold boxes; None where the gold answer is none or one of them has no area."""
    numbers = gold_boxes(sample.prompt.answer)
    boxes = [pair.gold_box(box, sample) if len(box) == 4 else None for box in numbers or []]
    return None if numbers is None or None in boxes else [box for box in boxes if box is not None]


def _gold_labelled(sample: Sample, pair: CoordinatePair) -> list[Labelled] | None:
    """The gold objects; None where the gold answer has none and does not say that there is nothing."""
    gold = sample.prompt.answer
    if isinstance(gold, str):
        text = extract_answer(gold)
        rows, nothing = parse_objects(text), states_nothing(text)
    else:
        rows = [gold] if isinstance(gold, dict) else list(gold) if isinstance(gold, (list, tuple)) else []
        nothing = isinstance(gold, (list, tuple)) and not gold
    objects = [parse_labelled_boxes(row) if isinstance(row, dict) else [] for row in rows]
    boxes = [(label, pair.gold_box(box, sample)) for row in objects for label, box in row]
    if any(not row for row in objects) or any(box is None for _, box in boxes) or (not boxes and not nothing):
        return None
    return [(label, box) for label, box in boxes if box is not None]


def _labelled(text: str, pair: CoordinatePair, sample: Sample, ranked: bool = False) -> list[Labelled]:
    """Objects of a response with a label and a box that has an area; others are left out."""
    objects = _by_score(parse_objects(text)) if ranked else parse_objects(text)
    boxes = [(label, pair.response_box(box, sample)) for row in objects for label, box in parse_labelled_boxes(row)]
    return [(label, box) for label, box in boxes if box is not None]


def _nothing(text: str) -> float:
    """Returns the reward of a string where there is nothing to find."""
    return float(not parse_boxes(text) and states_nothing(text))

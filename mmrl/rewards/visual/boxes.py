"""Rewards of boxes in the answer: of the last box, of boxes matched with gold boxes, and of labelled or ranked boxes.

`coordinates` and `answers` are the coordinate conventions of the response and of the gold boxes, see
`mmrl.rewards.visual.coordinates`; `resize` is for the convention "resized". Boxes have the forms of
`mmrl.rewards.parsing.boxes`, in the gold answer too. A gold answer without boxes, [], is met by a response that says so
("[]", "none", "There is no cat"), not by a box or an empty answer.
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
MAX_BOXES = 64  # boxes of a response that are matched; further ones are only counted, as too many


def box_iou(
    *,
    threshold: float | None = None,
    coordinates: str = "pixels",
    answers: str = "pixels",
    resize: Mapping[str, int] | None = None,
) -> Reward:
    """Builds a reward: the intersection over union (IoU), 0 to 1, of the answer's last box and the best gold box.

    threshold: if set, the reward is 1 if the IoU reaches it, else 0. No box, or a box without area, gets 0. The gold
    answer is one box or a list of them, [] if there is nothing to find; the reward is None for any other gold answer.
    coordinates, answers: conventions of the response and of the gold boxes; resize: see `CoordinatePair`.
    """
    return _box_reward(iou, 0.0, threshold, CoordinatePair(coordinates, answers, resize))


def box_giou(
    *,
    threshold: float | None = None,
    coordinates: str = "pixels",
    answers: str = "pixels",
    resize: Mapping[str, int] | None = None,
) -> Reward:
    """Builds the reward `box_iou`, with the same options, but the generalised IoU, -1 to 1 (Rezatofighi et al. 2019,
    arXiv:1902.09630); no box gets -1."""
    return _box_reward(giou, -1.0, threshold, CoordinatePair(coordinates, answers, resize))


def _box_reward(
    overlap: Callable[[Box, Box], float], missing: float, threshold: float | None, pair: CoordinatePair
) -> Reward:
    """Builds a reward: the best `overlap` of the answer's last box with a gold box.

    missing: the reward of an answer without a box. threshold: if set, the reward is 1 if the overlap reaches it, else
    0. pair: the coordinate conventions of the answer and of the gold boxes. None if the gold answer is not a box.
    """

    def best_overlap(sample: Sample) -> float | None:
        """Returns the largest overlap of the answer's last box with a gold box; `missing` without a box, None without
        gold boxes that can be read. `pair`: the coordinate conventions of the answer and of the gold boxes."""
        golds = _gold(sample, pair)
        if golds is None:
            return None
        answer = extract_answer(full_response(sample))
        boxes = parse_boxes(answer) or parse_boxes(without_thoughts(full_response(sample)))
        if not golds:  # nothing to find: right only if the answer says so
            return 1.0 if not boxes and states_nothing(answer) else missing
        box = pair.response_box(boxes[-1], sample) if boxes else None
        return missing if box is None else max(overlap(box, gold) for gold in golds)

    def reward(sample: Sample) -> float | None:
        best = best_overlap(sample)
        return best if best is None or threshold is None else float(best >= threshold)

    return reward


def boxes_matched(
    *,
    match: str = "hungarian",
    epsilon: float = 0.05,
    coordinates: str = "pixels",
    answers: str = "pixels",
    resize: Mapping[str, int] | None = None,
) -> Reward:
    """Builds a reward, 0 to 1: all boxes of the answer are matched with the gold boxes, and their IoUs added up.

    The sum is divided by the larger number of boxes, so that too many and too few boxes both cost. match: hungarian
    takes the best one-to-one pairs; sinkhorn weighs all pairs (entropic optimal transport with `epsilon`), so that a
    box near two gold boxes gets something from both. The gold answer is a list of boxes, [] if there is nothing to
    find; the reward is None if it is not. Other options: as for `box_iou`.
    """
    if match not in ("hungarian", "sinkhorn"):
        raise ValueError(f"match must be hungarian or sinkhorn, not {match!r}")
    if epsilon <= 0:
        raise ValueError(f"epsilon must be positive, not {epsilon}")
    pair = CoordinatePair(coordinates, answers, resize)

    def reward(sample: Sample) -> float | None:
        """Returns the matched boxes' IoUs, added up and divided by the larger number of boxes; None without gold boxes
        that can be read. `pair`: the coordinate conventions of the answer and of the gold boxes."""
        golds, answer = _gold(sample, pair), extract_answer(full_response(sample))
        if golds is None:
            return None
        numbers = parse_boxes(answer)
        if not golds or not numbers:  # nothing to find, or no box: right only if both, and the answer says so
            return float(not golds and not numbers and states_nothing(answer))
        boxes = [pair.response_box(box, sample) for box in numbers[:MAX_BOXES]]
        gains = [[0.0 if box is None else iou(box, gold) for gold in golds] for box in boxes]
        size = max(len(numbers), len(golds))
        if match == "hungarian":
            return sum(gains[row][column] for row, column in best_assignment(gains)) / size
        weights = soft_assignment(gains, epsilon)
        total = 0.0
        for row_weights, row_gains in zip(weights, gains, strict=True):
            total += sum(weight * gain for weight, gain in zip(row_weights, row_gains, strict=True))
        return total / size

    return reward


def labelled_boxes(
    *,
    threshold: float | None = None,
    whole_response: bool = False,
    coordinates: str = "pixels",
    answers: str = "pixels",
    resize: Mapping[str, int] | None = None,
) -> Reward:
    """Builds a reward, 0 to 1: objects with a label and a box are matched with gold objects of the same label, and
    their IoUs added up.

    The sum is divided by the larger number of objects. threshold: if set, a pair counts 1 if its IoU reaches it, else
    0. The response has JSON objects such as {"bbox_2d": [x1, y1, x2, y2], "label": "cat"} in its answer.
    whole_response: they may be anywhere in the response, also in steps of the reasoning. The gold answer is a list of
    such objects, [] if there is nothing to find; the reward is None if it is not. Other options: as for `box_iou`.
    """
    pair = CoordinatePair(coordinates, answers, resize)

    def reward(sample: Sample) -> float | None:
        """Returns the matched objects' IoUs, added up and divided by the larger number of objects; None without gold
        objects that can be read. `pair`: the coordinate conventions of the response and of the gold boxes."""
        golds = _gold_labelled(sample, pair)
        if golds is None:
            return None
        text = sample.response if whole_response else extract_answer(full_response(sample))
        predicted = _labelled(text, pair, sample)
        if not golds:
            return _absence_reward(text)
        gains = [
            [iou(box, gold) if label == name else 0.0 for name, gold in golds] for label, box in predicted[:MAX_BOXES]
        ]
        matched = [gains[row][column] for row, column in best_assignment(gains)]
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
    """Builds a reward: the mean average precision, 0 to 1, over labels and over IoU `thresholds`.

    Labelled boxes are as for `labelled_boxes`. They are ranked by their "score", highest first, or in the order in
    which they stand if any has no score. A label that is not in the gold answer has a precision of 0, so that naming
    all labels does not pay. Other options: as for `box_iou`.
    """
    pair = CoordinatePair(coordinates, answers, resize)

    def reward(sample: Sample) -> float | None:
        """Returns the mean average precision over labels and `thresholds`; None without gold objects that can be read.
        `pair`: the coordinate conventions of the answer and of the gold boxes."""
        golds, answer = _gold_labelled(sample, pair), extract_answer(full_response(sample))
        if golds is None:
            return None
        if not golds:
            return _absence_reward(answer)
        predicted = _labelled(answer, pair, sample, ranked=True)[:MAX_BOXES]
        labels = {label for label, _ in [*golds, *predicted]}
        values = []
        for label in labels:
            label_boxes = [box for name, box in predicted if name == label]
            label_golds = [box for name, box in golds if name == label]
            values += [_average_precision(label_boxes, label_golds, threshold) for threshold in thresholds]
        return sum(values) / len(values)

    return reward


def _average_precision(predicted: list[Box], golds: list[Box], threshold: float) -> float:
    """Returns the area under the precision-recall curve with monotone precision (all-point interpolation). predicted,
    golds: boxes of one label, the predicted ones most confident first. threshold: the smallest IoU of a match."""
    unmatched, hits = list(golds), []
    for box in predicted:
        best = max(unmatched, key=lambda gold: iou(box, gold), default=None)
        hit = best is not None and iou(box, best) >= threshold
        if hit and best is not None:
            unmatched.remove(best)
        hits.append(hit)
    if not golds:
        return 0.0
    precisions = [sum(hits[: i + 1]) / (i + 1) for i in range(len(hits))]
    return sum(max(precisions[i:]) for i in range(len(hits)) if hits[i]) / len(golds)


def _by_score(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sorts objects by score, highest first, if all have one."""
    if not all(isinstance(item.get("score"), int | float) for item in objects):
        return objects
    return sorted(objects, key=lambda item: -item["score"])


def _gold(sample: Sample, pair: CoordinatePair) -> list[Box] | None:
    """Returns the gold boxes; None if the gold answer cannot be read, or one of its boxes has no area."""
    numbers = gold_boxes(sample.prompt.answer)
    boxes = [pair.gold_box(box, sample) if len(box) == 4 else None for box in numbers or []]
    return None if numbers is None or None in boxes else [box for box in boxes if box is not None]


def _gold_labelled(sample: Sample, pair: CoordinatePair) -> list[Labelled] | None:
    """Returns the gold objects, [] if the gold answer says that there is nothing; None if it has no objects, or an
    object without a label or a valid box."""
    gold = sample.prompt.answer
    if isinstance(gold, str):
        text = extract_answer(gold)
        rows, says_nothing = parse_objects(text), states_nothing(text)
    else:
        if isinstance(gold, dict):
            gold = [gold]
        rows = list(gold) if isinstance(gold, (list, tuple)) else []
        says_nothing = isinstance(gold, (list, tuple)) and not gold
    objects = [parse_labelled_boxes(row) if isinstance(row, dict) else [] for row in rows]
    boxes = [(label, pair.gold_box(box, sample)) for row in objects for label, box in row]
    if any(not row for row in objects) or any(box is None for _, box in boxes) or (not boxes and not says_nothing):
        return None
    return [(label, box) for label, box in boxes if box is not None]


def _labelled(text: str, pair: CoordinatePair, sample: Sample, ranked: bool = False) -> list[Labelled]:
    """Returns the objects of a response that have a label and a box with an area. ranked: sort them by score."""
    objects = _by_score(parse_objects(text)) if ranked else parse_objects(text)
    boxes = [(label, pair.response_box(box, sample)) for row in objects for label, box in parse_labelled_boxes(row)]
    return [(label, box) for label, box in boxes if box is not None]


def _absence_reward(text: str) -> float:
    """Returns the reward of an answer if there is nothing to find: 1 if it says so and has no box, else 0."""
    return float(not parse_boxes(text) and states_nothing(text))

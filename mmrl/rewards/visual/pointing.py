"""Rewards of points, clicks and regions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mmrl.rewards.parsing.boxes import gold_boxes, gold_points, parse_objects, parse_points
from mmrl.rewards.parsing.responses import extract_answer, full_response
from mmrl.rewards.parsing.typography import normalize_case
from mmrl.rewards.types import Reward
from mmrl.rewards.visual.coordinates import CoordinatePair
from mmrl.rollouts import Sample

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

GRID = 256  # cells of a side on which regions are compared


def point_inside(
    *,
    coordinates: str = "pixels",
    answers: str = "pixels",
    resize: Mapping[str, int] | None = None,
    spread: float | None = None,
) -> Reward:
    """1 where the last point of the answer lies in the gold box, else 0. With `spread`, a fraction of the image's
    sides, a point outside gets exp(-d^2 / (2 spread^2)) for its distance d from the box. No point gets 0; None
    where the gold answer is not one box."""
    if spread is not None and spread <= 0:
        raise ValueError(f"spread must be positive, not {spread}")
    pair = CoordinatePair(coordinates, answers, resize)

    def reward(sample: Sample) -> float | None:
        boxes = gold_boxes(sample.prompt.answer)
        if boxes is None or len(boxes) != 1:
            return None
        points = parse_points(extract_answer(full_response(sample)))
        if not points:
            return 0.0
        apart = _distance(pair.response.unit(points[-1], sample), pair.gold.unit(boxes[0], sample))
        return float(apart == 0) if spread is None else math.exp(-(apart**2) / (2 * spread**2))

    return reward


def interface_action(
    *,
    kind_weight: float = 0.3,
    coordinates: str = "pixels",
    answers: str = "pixels",
    resize: Mapping[str, int] | None = None,
) -> Reward:
    """An action of a graphical interface as one JSON object, such as {"action": "click", "coordinate": [x, y]} or
    {"action": "type", "text": "hello"}: kind_weight for the right kind, and the rest for the right position or text.

    The gold answer has "action", and "box" [x1, y1, x2, y2] for actions at a position, or "text", compared by the F1 of
    its words. They count only where the kind is right. None where the gold is no such mapping.
    """
    if not 0 <= kind_weight <= 1:
        raise ValueError(f"kind_weight must lie in 0 .. 1, not {kind_weight}")
    pair = CoordinatePair(coordinates, answers, resize)

    def reward(sample: Sample) -> float | None:
        gold = _gold_action(sample.prompt.answer)
        if gold is None:
            return None
        actions = parse_objects(extract_answer(full_response(sample)))
        if len(actions) != 1 or actions[0].get("action") != gold["action"]:
            return 0.0
        return kind_weight + (1 - kind_weight) * _argument(actions[0], gold, pair, sample)

    return reward


def region_iou(
    *, coordinates: str = "pixels", answers: str = "pixels", resize: Mapping[str, int] | None = None
) -> Reward:
    """Intersection over union, 0 to 1, of the region that the points of the answer go round, in their order, and the
    gold one, a list of [x, y]; on a grid of 256 x 256. Fewer than three points get 0."""
    pair = CoordinatePair(coordinates, answers, resize)

    def reward(sample: Sample) -> float | None:
        gold = gold_points(sample.prompt.answer)
        if gold is None or len(gold) < 3:
            return None
        points = parse_points(extract_answer(full_response(sample)))
        if len(points) < 3:
            return 0.0
        region = _filled([pair.response.unit(point, sample) for point in points])
        wanted = _filled([pair.gold.unit(point, sample) for point in gold])
        union = int((region | wanted).sum())
        return int((region & wanted).sum()) / union if union else 0.0

    return reward


def _gold_action(gold: Any) -> dict[str, Any] | None:
    if isinstance(gold, str):
        objects = parse_objects(extract_answer(gold))
        gold = objects[0] if len(objects) == 1 else None
    return gold if isinstance(gold, dict) and isinstance(gold.get("action"), str) else None


def _argument(action: dict[str, Any], gold: dict[str, Any], pair: CoordinatePair, sample: Sample) -> float:
    """Scores the argument of a GUI action: point inside the gold box, F1 of typed words, else 1."""
    if "box" in gold:
        point = _numbers(action.get("coordinate"), 2)
        if point is None:
            return 0.0
        return float(_distance(pair.response.unit(point, sample), pair.gold.unit(gold["box"], sample)) == 0)
    if "text" in gold:
        return word_f1(str(action.get("text", "")), str(gold["text"]))
    return 1.0


def word_f1(text: str, gold: str) -> float:
    """Computes the F1 of words without case, each counted as often as it occurs."""
    words, wanted = normalize_case(text).split(), normalize_case(gold).split()
    if not words or not wanted:
        return float(words == wanted)
    shared = (Counter(words) & Counter(wanted)).total()
    return 2 * shared / (len(words) + len(wanted))


def _numbers(value: object, count: int) -> tuple[float, ...] | None:
    if not isinstance(value, list | tuple) or len(value) != count:
        return None
    return tuple(map(float, value)) if all(isinstance(n, int | float) for n in value) else None


def _distance(point: Sequence[float], box: Sequence[float]) -> float:
    """Computes the distance from a point (x, y) to a box (x0, y0, x1, y1), 0 inside. All are relative to the image's
    width and height, 0..1, and so is the distance."""
    outside = [max(low - p, 0.0, p - high) for p, low, high in zip(point, box[:2], box[2:], strict=True)]
    return math.hypot(*outside)


def _filled(points: Sequence[Sequence[float]]) -> NDArray[np.bool_]:
    import numpy as np
    from PIL import Image, ImageDraw

    canvas = Image.new("1", (GRID, GRID))
    ImageDraw.Draw(canvas).polygon([(x * GRID, y * GRID) for x, y in points], fill=1)
    return np.array(canvas)

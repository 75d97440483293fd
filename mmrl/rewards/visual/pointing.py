"""Rewards of points, actions in graphical interfaces, and regions."""

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

GRID = 256  # cells along each side of the grid on which regions are compared


def point_inside(
    *,
    coordinates: str = "pixels",
    answers: str = "pixels",
    resize: Mapping[str, int] | None = None,
    spread: float | None = None,
) -> Reward:
    """Builds a reward: 1 if the last point of the answer lies in the gold box, else 0.

    spread: a fraction of the image's sides; if set, a point outside gets exp(-d^2 / (2 spread^2)) for its distance d
    from the box. No point gets 0; the reward is None if the gold answer is not one box. coordinates, answers:
    conventions of the response and of the gold box; resize: see `CoordinatePair`.
    """
    if spread is not None and spread <= 0:
        raise ValueError(f"spread must be positive, not {spread}")
    pair = CoordinatePair(coordinates, answers, resize)

    def reward(sample: Sample) -> float | None:
        """Returns 1 if the answer's last point lies in the gold box, else 0, or less by its distance with `spread`;
        None without one gold box. `pair`: the coordinate conventions of the answer and of the gold box."""
        boxes = gold_boxes(sample.prompt.answer)
        if boxes is None or len(boxes) != 1:
            return None
        points = parse_points(extract_answer(full_response(sample)))
        if not points:
            return 0.0
        distance = _distance(pair.response.unit(points[-1], sample), pair.gold.unit(boxes[0], sample))
        return float(distance == 0) if spread is None else math.exp(-(distance**2) / (2 * spread**2))

    return reward


def interface_action(
    *,
    kind_weight: float = 0.3,
    coordinates: str = "pixels",
    answers: str = "pixels",
    resize: Mapping[str, int] | None = None,
) -> Reward:
    """Builds a reward for an action in a graphical interface: `kind_weight` for the right action, the rest for its
    position or text.

    The answer is one JSON object, such as {"action": "click", "coordinate": [x, y]} or {"action": "type", "text":
    "hello"}. The gold answer has "action", and "box" [x1, y1, x2, y2] for actions at a position, or "text", which is
    compared by the F1 of its words. Position and text count only if the action is right. None if the gold answer is not
    such an object. Other options: as for `point_inside`.
    """
    if not 0 <= kind_weight <= 1:
        raise ValueError(f"kind_weight must be from 0 to 1, not {kind_weight}")
    pair = CoordinatePair(coordinates, answers, resize)

    def reward(sample: Sample) -> float | None:
        """Returns `kind_weight` for the right action, and the rest for its argument; None without a gold action.
        `pair`: the coordinate conventions of the answer and of the gold box."""
        gold = _gold_action(sample.prompt.answer)
        if gold is None:
            return None
        actions = parse_objects(extract_answer(full_response(sample)))
        if len(actions) != 1 or actions[0].get("action") != gold["action"]:
            return 0.0
        return kind_weight + (1 - kind_weight) * _argument_score(actions[0], gold, pair, sample)

    return reward


def region_iou(
    *, coordinates: str = "pixels", answers: str = "pixels", resize: Mapping[str, int] | None = None
) -> Reward:
    """Builds a reward: the IoU, 0 to 1, of the polygon through the answer's points, in their order, and the gold
    polygon, a list of [x, y].

    It is computed on a grid of 256 x 256. Fewer than three points get 0; the reward is None if the gold answer has
    fewer. The options are those of `point_inside`.
    """
    pair = CoordinatePair(coordinates, answers, resize)

    def reward(sample: Sample) -> float | None:
        """Returns the IoU of the polygons of the answer and of the gold answer; None without a gold polygon. `pair`:
        the coordinate conventions of the answer and of the gold answer."""
        gold = gold_points(sample.prompt.answer)
        if gold is None or len(gold) < 3:
            return None
        points = parse_points(extract_answer(full_response(sample)))
        if len(points) < 3:
            return 0.0
        region = _fill_polygon([pair.response.unit(point, sample) for point in points])
        gold_region = _fill_polygon([pair.gold.unit(point, sample) for point in gold])
        union = int((region | gold_region).sum())
        return int((region & gold_region).sum()) / union if union else 0.0

    return reward


def _gold_action(gold: Any) -> dict[str, Any] | None:
    """Reads the gold action, a dict or a string that contains one JSON object; None for any other answer."""
    if isinstance(gold, str):
        objects = parse_objects(extract_answer(gold))
        gold = objects[0] if len(objects) == 1 else None
    return gold if isinstance(gold, dict) and isinstance(gold.get("action"), str) else None


def _argument_score(action: dict[str, Any], gold: dict[str, Any], pair: CoordinatePair, sample: Sample) -> float:
    """Scores the argument of an interface action, 0 to 1: whether the point is inside the gold box, or the F1 of typed
    words; 1 if the gold action has neither."""
    if "box" in gold:
        point = _numbers(action.get("coordinate"), 2)
        if point is None:
            return 0.0
        return float(_distance(pair.response.unit(point, sample), pair.gold.unit(gold["box"], sample)) == 0)
    if "text" in gold:
        return word_f1(str(action.get("text", "")), str(gold["text"]))
    return 1.0


def word_f1(text: str, gold: str) -> float:
    """Returns the F1 of the words of two texts, without case; each word counts as often as it occurs."""
    words, gold_words = normalize_case(text).split(), normalize_case(gold).split()
    if not words or not gold_words:
        return float(words == gold_words)
    shared = (Counter(words) & Counter(gold_words)).total()
    return 2 * shared / (len(words) + len(gold_words))


def _numbers(value: object, count: int) -> tuple[float, ...] | None:
    """Returns a list of `count` numbers as a tuple; None for anything else."""
    if not isinstance(value, list | tuple) or len(value) != count:
        return None
    return tuple(map(float, value)) if all(isinstance(n, int | float) for n in value) else None


def _distance(point: Sequence[float], box: Sequence[float]) -> float:
    """Returns the distance from a point (x, y) to a box (x0, y0, x1, y1), 0 inside. All are fractions of the image's
    width and height."""
    outside = [max(low - p, 0.0, p - high) for p, low, high in zip(point, box[:2], box[2:], strict=True)]
    return math.hypot(*outside)


def _fill_polygon(points: Sequence[Sequence[float]]) -> NDArray[np.bool_]:
    """Returns which cells of the grid a polygon covers, [GRID, GRID]. points: fractions of the image's sides."""
    import numpy as np
    from PIL import Image, ImageDraw

    canvas = Image.new("1", (GRID, GRID))
    ImageDraw.Draw(canvas).polygon([(x * GRID, y * GRID) for x, y in points], fill=1)
    return np.array(canvas)

"""Whether an image shows the objects that its prompt asks for, as many, of the colour and where: GenEval's checks.

Ghosh et al. 2023, "GenEval" (arXiv 2310.11513), with any detector of `mmrl.rewards.visual.detectors`. Prompts carry
what they ask for in their metadata, as `task.data.format=geneval` reads it: `include`, and where something must not be
there `exclude`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mmrl.errors import UserError
from mmrl.rewards.overlap import Box
from mmrl.rewards.types import Score, as_pil, image_of, nearest, score_finite
from mmrl.rewards.visual.detectors import DetectedObject, Detector
from mmrl.rewards.visual.detectors import detector as made
from mmrl.rollouts import Sample

MOST = 16  # objects of one class that count, the surest
MARGIN = 0.1  # of both boxes' sides, by which objects must lie apart before one is left of or above the other
LEAN = 0.5  # of the direction's length, that its horizontal or vertical part must exceed
COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white", "gray")
INNER = 0.8  # of the sides of a box, where its colour is looked for
LIKE_BACKGROUND = 40.0  # of 255 in each channel: pixels nearer to the surroundings than this are not the object


class GenEval:
    """1 where an image passes all checks of its prompt, else 0; with `partial` the share of checks that it passes.

    The checks: for each object of `include`, that at least `count` of its class are there; that `count` of them have
    its `color`; that all of them lie where `position` = [relation, index of another] says; and for each of
    `exclude` that fewer than `count` of it are there. Prompts with the tag `counting` take `count_threshold` as the
    least score of an object, others `threshold`: GenEval has 0.3 and 0.9 with its large detector, and small detectors
    are less sure.

    detector: `kind` and its options, see `mmrl.rewards.visual.detectors`. None for an image that holds NaN or inf.
    Raises UserError for a class that the detector can not find, and for a prompt without `include`.
    """

    scope: Literal["sample"] = "sample"

    def __init__(
        self,
        *,
        detector: Mapping[str, Any],
        threshold: float = 0.3,
        count_threshold: float = 0.9,
        partial: bool = False,
    ) -> None:
        if not 0 <= threshold <= 1 or not 0 <= count_threshold <= 1:
            raise ValueError(f"thresholds lie between 0 and 1, not {threshold} and {count_threshold}")
        self.detector: Detector = made(detector)
        self.threshold, self.count_threshold, self.partial = threshold, count_threshold, partial

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        for sample in samples:
            self._check(sample)
        return score_finite(samples, self._score)

    def _score(self, samples: list[Sample]) -> list[float]:
        images = [as_pil(image_of(sample)) for sample in samples]
        least = min(self.threshold, self.count_threshold)
        found = self.detector.detect(images, least)
        scores = []
        for sample, image, objects in zip(samples, images, found, strict=True):
            bar = self.count_threshold if sample.prompt.metadata.get("tag") == "counting" else self.threshold
            passed = list(checks([one for one in objects if one.score >= bar], image, sample.prompt.metadata).values())
            scores.append(sum(passed) / len(passed) if self.partial else float(all(passed)))
        return scores

    def _check(self, sample: Sample) -> None:
        asked = sample.prompt.metadata
        if not asked.get("include"):
            raise UserError(f"prompt {sample.prompt.id!r} has no `include`; set task.data.format=geneval")
        for item in [*asked["include"], *asked.get("exclude", [])]:
            if item["class"] not in self.detector.labels:
                close = nearest(item["class"], self.detector.labels)
                raise UserError(f"prompt {sample.prompt.id!r}: the detector knows no {item['class']!r}{close}")
            if "color" in item and item["color"] not in COLOURS:
                raise UserError(f"prompt {sample.prompt.id!r}: color must be one of {', '.join(COLOURS)}")


def checks(found: Sequence[DetectedObject], image: Image.Image, asked: Mapping[str, Any]) -> dict[str, bool]:
    """Each check of a prompt by name ("0 object", "0 color", "1 position", "exclude 0"), and whether it is passed.

    asked: a prompt's `include` and `exclude`. An object that is not there fails its colour and its position too.
    """
    boxes = {
        item["class"]: [one.box for one in found if one.label == item["class"]][:MOST]
        for item in [*asked["include"], *asked.get("exclude", [])]
    }
    chosen = [boxes[item["class"]][: item["count"]] for item in asked["include"]]
    passed = {}
    for index, item in enumerate(asked["include"]):
        there = len(chosen[index]) >= item["count"]
        passed[f"{index} object"] = there
        if "color" in item:
            of_colour = sum(colour(image, box) == item["color"] for box in chosen[index])
            passed[f"{index} color"] = there and of_colour >= item["count"]
        if "position" in item:
            wanted, other = item["position"]
            pairs = [(box, target) for box in chosen[index] for target in chosen[other]]
            passed[f"{index} position"] = there and bool(pairs) and all(wanted in relations(a, b) for a, b in pairs)
    for index, item in enumerate(asked.get("exclude", [])):
        passed[f"exclude {index}"] = len(boxes[item["class"]]) < item["count"]
    return passed


def relations(box: Box, other: Box) -> set[str]:
    """What of "left of", "right of", "above" and "below" is true of `box` as seen from `other`.

    The way from middle to middle is shortened by MARGIN of both boxes' sides along each axis; a relation holds where
    what is left of it along its axis is more than LEAN of the whole way.
    """
    (left, top, right, bottom), (l2, t2, r2, b2) = box, other
    way = np.array([(left + right - l2 - r2) / 2, (top + bottom - t2 - b2) / 2])
    sides = np.array([right - left + r2 - l2, bottom - top + b2 - t2])
    short = np.maximum(np.abs(way) - MARGIN * sides, 0) * np.sign(way)
    if not short.any():
        return set()
    across, down = short / np.linalg.norm(way)
    told = {"left of": across < -LEAN, "right of": across > LEAN, "above": down < -LEAN, "below": down > LEAN}
    return {name for name, true in told.items() if true}


def colour(image: Image.Image, box: Box) -> str:
    """The colour that most pixels in the middle of a box have, those like the surroundings left out.

    The surroundings are the median of a frame around the box, of a tenth of its sides. Where all is like them, all
    counts.
    """
    pixels = np.asarray(image.convert("RGB"), np.float32)
    left, top, right, bottom = box
    width, height = right - left, bottom - top
    outer = _cut(pixels, (left - width / 10, top - height / 10, right + width / 10, bottom + height / 10))
    margin = (1 - INNER) / 2
    inner = (left + margin * width, top + margin * height, right - margin * width, bottom - margin * height)
    middle = _cut(pixels, inner).reshape(-1, 3)
    edge = max(1, round(min(outer.shape[:2]) / 12))
    frame = [outer[:edge], outer[-edge:], outer[:, :edge], outer[:, -edge:]]
    around = np.median(np.concatenate([part.reshape(-1, 3) for part in frame]), axis=0)
    own = middle[np.abs(middle - around).max(1) > LIKE_BACKGROUND]
    names = _named(own if len(own) else middle)
    return COLOURS[int(np.bincount(names, minlength=len(COLOURS)).argmax())]


def _cut(pixels: NDArray[np.float32], box: Box) -> NDArray[np.float32]:
    """At least one pixel of the image."""
    height, width = pixels.shape[:2]
    left, top = min(max(0, round(box[0])), width - 1), min(max(0, round(box[1])), height - 1)
    return pixels[top : max(top + 1, round(box[3])), left : max(left + 1, round(box[2]))]


def _named(pixels: NDArray[np.float32]) -> NDArray[np.int64]:
    """[pixel, RGB] of 0 to 255 -> indices of COLOURS, by hue, saturation and value."""
    high, low = pixels.max(1), pixels.min(1)
    span = np.maximum(high - low, 1e-6)
    value, saturation = high / 255, (high - low) / np.maximum(high, 1e-6)
    red, green, blue = pixels.T
    turn = np.select(
        [high == red, high == green], [((green - blue) / span) % 6, (blue - red) / span + 2], (red - green) / span + 4
    )
    hue = turn * 60
    dull = saturation < 0.2
    rules = [
        (value < 0.2, "black"),
        (dull & (value > 0.8), "white"),
        (dull, "gray"),
        ((hue >= 10) & (hue < 45) & (value < 0.65), "brown"),
        ((hue < 15) | (hue >= 345), "red"),
        (hue < 40, "orange"),
        (hue < 70, "yellow"),
        (hue < 170, "green"),
        (hue < 260, "blue"),
        (hue < 295, "purple"),
    ]
    return np.select([where for where, _ in rules], [COLOURS.index(name) for _, name in rules], COLOURS.index("pink"))

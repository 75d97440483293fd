"""GenEval's checks: an image shows the objects of its prompt, in their number, colour and position.

Ghosh et al. 2023, "GenEval" (arXiv 2310.11513), with any detector of `mmrl.rewards.visual.detectors`. Prompts have the
wanted objects in their metadata as `include`, and unwanted ones as `exclude`, as `task.data.format=geneval` reads them.
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
from mmrl.rewards.visual.detectors import detector as build_detector
from mmrl.rollouts import Sample

MOST = 16  # objects of one class that count, highest scores first
MARGIN = 0.1  # share of both boxes' sides by which objects must lie apart before one is left of or above the other
LEAN = 0.5  # share of the direction's length that its horizontal or vertical part must exceed
COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white", "gray")
INNER = 0.8  # share of the sides of a box from which its colour is read
LIKE_BACKGROUND = 40.0  # of 255 in each channel; pixels nearer to the surroundings are not the object


class GenEval:
    """1 where an image passes all checks of its prompt, else 0; with `partial` the share of checks that it passes.

    The checks: for each object of `include`, that at least `count` of its class are there; that `count` of them have
    its `color`; that all of them lie where `position` = [relation, index of another] says; and for each of `exclude`
    that fewer than `count` of it are there. Prompts with the tag `counting` take `count_threshold` as the least score
    of an object, others `threshold`: GenEval has 0.3 and 0.9 with its large detector, and small detectors are less
    sure.

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
        self.detector: Detector = build_detector(detector)
        self.threshold, self.count_threshold, self.partial = threshold, count_threshold, partial

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        for sample in samples:
            self._check(sample)
        return score_finite(samples, self._score)

    def _score(self, samples: list[Sample]) -> list[float]:
        images = [as_pil(image_of(sample)) for sample in samples]
        least = min(self.threshold, self.count_threshold)
        detected = self.detector.detect(images, least)
        scores = []
        for sample, image, objects in zip(samples, images, detected, strict=True):
            bar = self.count_threshold if sample.prompt.metadata.get("tag") == "counting" else self.threshold
            passed = list(checks([one for one in objects if one.score >= bar], image, sample.prompt.metadata).values())
            scores.append(sum(passed) / len(passed) if self.partial else float(all(passed)))
        return scores

    def _check(self, sample: Sample) -> None:
        """Raises UserError for a prompt without GenEval's metadata, with a class that the detector lacks, or with an
        unknown colour."""
        metadata = sample.prompt.metadata
        if not metadata.get("include"):
            raise UserError(f"prompt {sample.prompt.id!r} has no `include`; set task.data.format=geneval")
        for item in [*metadata["include"], *metadata.get("exclude", [])]:
            if item["class"] not in self.detector.labels:
                close = nearest(item["class"], self.detector.labels)
                raise UserError(f"prompt {sample.prompt.id!r}: the detector has no class {item['class']!r}{close}")
            if "color" in item and item["color"] not in COLOURS:
                raise UserError(f"prompt {sample.prompt.id!r}: color must be one of {', '.join(COLOURS)}")


def checks(objects: Sequence[DetectedObject], image: Image.Image, metadata: Mapping[str, Any]) -> dict[str, bool]:
    """Returns the checks of a prompt by name ("0 object", "0 color", "1 position", "exclude 0"), True where passed.

    metadata: a prompt's `include` and `exclude`. A missing object fails its colour and its position too.
    """
    boxes = {
        item["class"]: [one.box for one in objects if one.label == item["class"]][:MOST]
        for item in [*metadata["include"], *metadata.get("exclude", [])]
    }
    chosen = [boxes[item["class"]][: item["count"]] for item in metadata["include"]]
    passed = {}
    for index, item in enumerate(metadata["include"]):
        present = len(chosen[index]) >= item["count"]
        passed[f"{index} object"] = present
        if "color" in item:
            of_colour = sum(colour(image, box) == item["color"] for box in chosen[index])
            passed[f"{index} color"] = present and of_colour >= item["count"]
        if "position" in item:
            wanted, other = item["position"]
            pairs = [(box, target) for box in chosen[index] for target in chosen[other]]
            passed[f"{index} position"] = present and bool(pairs) and all(wanted in relations(a, b) for a, b in pairs)
    for index, item in enumerate(metadata.get("exclude", [])):
        passed[f"exclude {index}"] = len(boxes[item["class"]]) < item["count"]
    return passed


def relations(box: Box, other: Box) -> set[str]:
    """Returns which of "left of", "right of", "above" and "below" hold for `box` relative to `other`.

    The vector between the centres is shortened by MARGIN of both boxes' sides along each axis; a relation holds where
    its component is more than LEAN of the shortened vector's length.
    """
    (left, top, right, bottom), (l2, t2, r2, b2) = box, other
    way = np.array([(left + right - l2 - r2) / 2, (top + bottom - t2 - b2) / 2])
    sides = np.array([right - left + r2 - l2, bottom - top + b2 - t2])
    short = np.maximum(np.abs(way) - MARGIN * sides, 0) * np.sign(way)
    if not short.any():
        return set()
    across, down = short / np.linalg.norm(way)
    holds = {"left of": across < -LEAN, "right of": across > LEAN, "above": down < -LEAN, "below": down > LEAN}
    return {name for name, true in holds.items() if true}


def colour(image: Image.Image, box: Box) -> str:
    """Returns the most frequent colour of the pixels in the middle of a box, without those like the surroundings.

    The surroundings are the median of a frame around the box, of a tenth of its sides. Where all pixels are like them,
    all count.
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
    distinct = middle[np.abs(middle - around).max(1) > LIKE_BACKGROUND]
    names = _named(distinct if len(distinct) else middle)
    return COLOURS[int(np.bincount(names, minlength=len(COLOURS)).argmax())]


def _cut(pixels: NDArray[np.float32], box: Box) -> NDArray[np.float32]:
    """Cuts a box out of an image, at least one pixel."""
    height, width = pixels.shape[:2]
    left, top = min(max(0, round(box[0])), width - 1), min(max(0, round(box[1])), height - 1)
    return pixels[top : max(top + 1, round(box[3])), left : max(left + 1, round(box[2]))]


def _named(pixels: NDArray[np.float32]) -> NDArray[np.int64]:
    """Returns indices of COLOURS for pixels [pixel, RGB] of 0 to 255, by hue, saturation and value."""
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

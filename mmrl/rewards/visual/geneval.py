"""GenEval's checks: whether an image shows the objects of its prompt, in their number, colour and position.

Ghosh et al. 2023, "GenEval" (arXiv 2310.11513), with any detector of `mmrl.rewards.visual.detectors`. A prompt has the
expected objects in its metadata as `include`, and objects that must not be there as `exclude`, as
`task.data.format=geneval` reads them.
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

MAX_OBJECTS = 16  # objects of one class that are used, highest scores first
MARGIN = 0.1  # share of both boxes' sides by which their centres must differ, for a position such as "left of"
MIN_COMPONENT = 0.5  # share of the distance that its horizontal or vertical part must exceed
COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white", "gray")
INNER = 0.8  # share of a box's sides, around its centre, from which its color is read
BACKGROUND_DISTANCE = 40.0  # of 255 in each channel; pixels closer to the background are not the object


class GenEval:
    """1 if an image passes all checks of its prompt, else 0. partial: the share of checks that it passes instead.

    The checks are: for each object of `include`, that at least `count` of its class are there, that `count` of them
    have its `color`, and that all of them have the relation of `position` = [relation, index of another object in
    `include`] to that object; for each object of `exclude`, that fewer than `count` are there.

    threshold: lowest score of a detected object; count_threshold: the same for prompts with the tag `counting`. GenEval
    uses 0.3 and 0.9 with its large detector; small detectors have lower scores. detector: `kind` and its options, see
    `mmrl.rewards.visual.detectors`. None for an image with NaN or inf. Raises UserError for a class that the detector
    does not have, and for a prompt without `include`.
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
        for key, value in (("threshold", threshold), ("count_threshold", count_threshold)):
            if not 0 <= value <= 1:
                raise ValueError(f"{key} must be from 0 to 1, not {value}")
        self.detector: Detector = build_detector(detector)
        self.threshold, self.count_threshold, self.partial = threshold, count_threshold, partial

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        for sample in samples:
            self._check(sample)
        return score_finite(samples, self._score)

    def _score(self, samples: list[Sample]) -> list[float]:
        """Returns for each sample 1 if its image passes all checks of its prompt, else 0; if `partial`, the share of
        checks that it passes."""
        images = [as_pil(image_of(sample)) for sample in samples]
        detected = self.detector.detect(images, min(self.threshold, self.count_threshold))
        scores = []
        for sample, image, objects in zip(samples, images, detected, strict=True):
            is_counting = sample.prompt.metadata.get("tag") == "counting"
            threshold = self.count_threshold if is_counting else self.threshold
            confident = [detected for detected in objects if detected.score >= threshold]
            passed = list(checks(confident, image, sample.prompt.metadata).values())
            scores.append(sum(passed) / len(passed) if self.partial else float(all(passed)))
        return scores

    def _check(self, sample: Sample) -> None:
        """Raises UserError for a prompt without GenEval's metadata, with a class that the detector lacks, or with an
        unknown color."""
        metadata = sample.prompt.metadata
        if not metadata.get("include"):
            raise UserError(f"prompt {sample.prompt.id!r} has no key `include`; set task.data.format=geneval")
        for item in [*metadata["include"], *metadata.get("exclude", [])]:
            if item["class"] not in self.detector.labels:
                close = nearest(item["class"], self.detector.labels)
                raise UserError(
                    f"prompt {sample.prompt.id!r}: the detector has no class {item['class']!r}{close}; correct its "
                    "row, or choose another detector"
                )
            if "color" in item and item["color"] not in COLORS:
                raise UserError(
                    f"prompt {sample.prompt.id!r}: color must be one of {', '.join(COLORS)}, not {item['color']!r}"
                )


def checks(objects: Sequence[DetectedObject], image: Image.Image, metadata: Mapping[str, Any]) -> dict[str, bool]:
    """Returns the checks of a prompt by name ("0 object", "0 color", "1 position", "exclude 0"), True if passed.

    metadata: that of the prompt, with `include` and `exclude`. A missing object fails its color and position checks
    too.
    """
    boxes = {
        item["class"]: [detected.box for detected in objects if detected.label == item["class"]][:MAX_OBJECTS]
        for item in [*metadata["include"], *metadata.get("exclude", [])]
    }
    selected = [boxes[item["class"]][: item["count"]] for item in metadata["include"]]
    passed = {}
    for index, item in enumerate(metadata["include"]):
        is_present = len(selected[index]) >= item["count"]
        passed[f"{index} object"] = is_present
        if "color" in item:
            num_with_color = sum(color_of(image, box) == item["color"] for box in selected[index])
            passed[f"{index} color"] = is_present and num_with_color >= item["count"]
        if "position" in item:
            relation, other = item["position"]  # other: an index in `include`
            pairs = [(box, target) for box in selected[index] for target in selected[other]]
            passed[f"{index} position"] = (
                is_present and bool(pairs) and all(relation in relations(box, target) for box, target in pairs)
            )
    for index, item in enumerate(metadata.get("exclude", [])):
        passed[f"exclude {index}"] = len(boxes[item["class"]]) < item["count"]
    return passed


def relations(box: Box, other: Box) -> set[str]:
    """Returns which of "left of", "right of", "above" and "below" hold for `box` relative to `other`.

    The vector between the centres is shortened by MARGIN of both boxes' sides along each axis. A relation holds if its
    component exceeds MIN_COMPONENT of the length of the vector before it was shortened.
    """
    (left, top, right, bottom), (l2, t2, r2, b2) = box, other
    offset = np.array([(left + right - l2 - r2) / 2, (top + bottom - t2 - b2) / 2])
    sides = np.array([right - left + r2 - l2, bottom - top + b2 - t2])
    shortened = np.maximum(np.abs(offset) - MARGIN * sides, 0) * np.sign(offset)
    if not shortened.any():
        return set()
    x, y = shortened / np.linalg.norm(offset)
    holds = {
        "left of": x < -MIN_COMPONENT,
        "right of": x > MIN_COMPONENT,
        "above": y < -MIN_COMPONENT,
        "below": y > MIN_COMPONENT,
    }
    return {name for name, is_true in holds.items() if is_true}


def color_of(image: Image.Image, box: Box) -> str:
    """Returns the most frequent color, one of COLORS, in the middle of a box; pixels similar to the background are
    ignored.

    The background is the median color of the border of the box, enlarged by a tenth of its sides. If all pixels are
    similar to it, all are used.
    """
    pixels = np.asarray(image.convert("RGB"), np.float32)
    left, top, right, bottom = box
    width, height = right - left, bottom - top
    surroundings = _crop(pixels, (left - width / 10, top - height / 10, right + width / 10, bottom + height / 10))
    margin = (1 - INNER) / 2
    inner = (left + margin * width, top + margin * height, right - margin * width, bottom - margin * height)
    pixels_inside = _crop(pixels, inner).reshape(-1, 3)
    frame_width = max(1, round(min(surroundings.shape[:2]) / 12))  # the tenth by which the box of 10 / 12 was enlarged
    frame = [
        surroundings[:frame_width],
        surroundings[-frame_width:],
        surroundings[:, :frame_width],
        surroundings[:, -frame_width:],
    ]
    background = np.median(np.concatenate([part.reshape(-1, 3) for part in frame]), axis=0)
    distinct = pixels_inside[np.abs(pixels_inside - background).max(1) > BACKGROUND_DISTANCE]
    colors = _color_indices(distinct if len(distinct) else pixels_inside)
    return COLORS[int(np.bincount(colors, minlength=len(COLORS)).argmax())]


def _crop(pixels: NDArray[np.float32], box: Box) -> NDArray[np.float32]:
    """Returns the pixels [height, width, RGB] inside a box, at least one."""
    height, width = pixels.shape[:2]
    left, top = min(max(0, round(box[0])), width - 1), min(max(0, round(box[1])), height - 1)
    return pixels[top : max(top + 1, round(box[3])), left : max(left + 1, round(box[2]))]


def _color_indices(pixels: NDArray[np.float32]) -> NDArray[np.int64]:
    """Returns the index in COLORS of each pixel [pixel, RGB] of 0 to 255, by its hue, saturation and value."""
    high, low = pixels.max(1), pixels.min(1)
    chroma = np.maximum(high - low, 1e-6)
    value, saturation = high / 255, (high - low) / np.maximum(high, 1e-6)
    red, green, blue = pixels.T
    sector = np.select(
        [high == red, high == green],
        [((green - blue) / chroma) % 6, (blue - red) / chroma + 2],
        (red - green) / chroma + 4,
    )
    hue = sector * 60
    is_grey = saturation < 0.2
    rules = [  # of several conditions that hold, the first counts
        (value < 0.2, "black"),
        (is_grey & (value > 0.8), "white"),
        (is_grey, "gray"),
        ((hue >= 10) & (hue < 45) & (value < 0.65), "brown"),
        ((hue < 15) | (hue >= 345), "red"),
        (hue < 40, "orange"),
        (hue < 70, "yellow"),
        (hue < 170, "green"),
        (hue < 260, "blue"),
        (hue < 295, "purple"),
    ]
    return np.select(
        [condition for condition, _ in rules], [COLORS.index(name) for _, name in rules], COLORS.index("pink")
    )

"""Conventions of coordinates in an image.

convention
  pixels        of the prompt's image
  thousandths   0 to 1000 of either side, as Qwen3-VL and many others use
  unit          0 to 1 of either side
  resized       pixels of the image after the processor's resize, as Qwen2.5-VL uses: sides are multiples of
                `factor`, and the area is min_pixels to max_pixels
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from mmrl.errors import UserError
from mmrl.rewards.overlap import Box, to_box
from mmrl.rollouts import Sample

CONVENTIONS = ("pixels", "thousandths", "unit", "resized")


@dataclass(frozen=True)
class Resize:
    """The smart resize of Qwen2-VL's image processor: sides become multiples of `factor`, and the area min_pixels to
    max_pixels."""

    factor: int = 28
    min_pixels: int = 3136
    max_pixels: int = 12845056

    def size(self, width: int, height: int) -> tuple[int, int]:
        """Returns the width and the height after Qwen2-VL's smart resize: the nearest multiples of `factor`, scaled
        together if their area is not in min_pixels..max_pixels."""
        sides = [max(self.factor, round(side / self.factor) * self.factor) for side in (width, height)]
        area = width * height
        if sides[0] * sides[1] > self.max_pixels:
            ratio = math.sqrt(area / self.max_pixels)
            sides = [max(self.factor, int(side / ratio // self.factor) * self.factor) for side in (width, height)]
        elif sides[0] * sides[1] < self.min_pixels:
            ratio = math.sqrt(self.min_pixels / area)
            sides = [math.ceil(side * ratio / self.factor) * self.factor for side in (width, height)]
        return sides[0], sides[1]


class Coordinates:
    """Converts coordinates of one convention to fractions of the image's width and height. Raises ValueError for an
    unknown convention, and for an unknown key of `resize`. key: the option that names the convention."""

    def __init__(self, convention: str, resize: Mapping[str, int] | None = None, key: str = "coordinates") -> None:
        if convention not in CONVENTIONS:
            raise ValueError(f"{key} must be one of {', '.join(CONVENTIONS)}, not {convention!r}")
        unknown = set(resize or {}) - {field.name for field in fields(Resize)}
        if unknown:
            raise ValueError(
                f"resize has no key {', '.join(sorted(unknown))}; its keys are factor, min_pixels, max_pixels"
            )
        self.convention, self.resize = convention, Resize(**(resize or {}))

    def unit(self, numbers: Sequence[float], sample: Sample) -> tuple[float, ...]:
        """Converts x, y, x, y, ... to fractions of the first image's width and height. Raises UserError if the
        convention needs the size of an image and the prompt has none."""
        width, height = self.sides(sample)
        return tuple(number / (height if i % 2 else width) for i, number in enumerate(numbers))

    def sides(self, sample: Sample) -> tuple[float, float]:
        """Returns the width and the height of the image in this convention. Raises UserError like `unit`."""
        if self.convention == "unit":
            return 1.0, 1.0
        if self.convention == "thousandths":
            return 1000.0, 1000.0
        if not sample.prompt.images:
            raise UserError(
                f"prompt {sample.prompt.id!r} has no image, but {self.convention!r} coordinates need its size; add one "
                "to its row, or set the reward's coordinates to thousandths or unit"
            )
        size = sample.prompt.images[0].size
        return self.resize.size(*size) if self.convention == "resized" else size


class CoordinatePair:
    """The coordinate conventions of the response and of the gold answer. Raises ValueError like `Coordinates`, and for
    a `resize` that neither convention uses."""

    def __init__(self, coordinates: str, answers: str, resize: Mapping[str, int] | None) -> None:
        """coordinates: the convention of the response; answers: that of the gold answer; resize: as for
        `Coordinates`."""
        self.response, self.gold = Coordinates(coordinates, resize), Coordinates(answers, resize, "answers")
        if resize is not None and "resized" not in (coordinates, answers):
            raise ValueError(
                f"resize is for coordinates 'resized', but coordinates={coordinates} and answers={answers}; remove it"
            )
        self._same = coordinates == answers  # then boxes are compared without a conversion, which would need an image

    def response_box(self, numbers: Sequence[float], sample: Sample) -> Box | None:
        """Converts a box of the response; None if it has no area."""
        return self._box(self.response, numbers, sample)

    def gold_box(self, numbers: Sequence[float], sample: Sample) -> Box | None:
        """Converts a box of the gold answer, for comparison with those of the response; None if it has no area."""
        return self._box(self.gold, numbers, sample)

    def _box(self, coordinates: Coordinates, numbers: Sequence[float], sample: Sample) -> Box | None:
        return to_box(numbers if self._same else coordinates.unit(numbers, sample))

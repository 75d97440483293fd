"""Reads scenes of shapes from pixels and marks them, exactly: what GenEval does with detectors (Ghosh et al. 2023,
arXiv:2310.11513) needs no network here.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Literal

import numpy as np
import torch
from scipy import ndimage
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from mmrl.rewards.types import image_of, score_finite
from mmrl.rollouts import Sample
from mmrl.tasks.image_generation.data.images import stack_images
from mmrl.tasks.image_generation.data.shapes import (
    COLOURS,
    OBJECT,
    SHAPES,
    SIZE,
    PlacedShape,
    ShapeScene,
    draw,
    related,
    template,
)

SPECK = 4  # connected pixels of a colour below which they are not an object
MATCH = 0.7  # intersection over union with the template from which a component has a shape
_MARGIN = 1  # how far, in pixels, the template may lie from the top left of a component that misses or adds some
_FRAME = OBJECT + 2 * _MARGIN
_SHIFTS = list(product(range(2 * _MARGIN + 1), repeat=2))
_PALETTE = torch.tensor([(0.0, 0.0, 0.0), *COLOURS.values()])
_IN_PLANE = np.stack([np.zeros((3, 3)), ndimage.generate_binary_structure(2, 1), np.zeros((3, 3))])


def _templates() -> np.ndarray:
    """Returns each shape at each shift in the frame, [shape * shift, _FRAME * _FRAME] float32."""
    frames = np.zeros((len(SHAPES), len(_SHIFTS), _FRAME, _FRAME), dtype=np.float32)
    for (s, shape), (i, (down, right)) in product(enumerate(SHAPES), enumerate(_SHIFTS)):
        frames[s, i, down : down + OBJECT, right : right + OBJECT] = template(shape)
    return frames.reshape(len(SHAPES) * len(_SHIFTS), -1)


_TEMPLATES = _templates()


def read(images: Tensor) -> list[list[PlacedShape]]:
    """Returns the objects of each image, [image, 3, SIZE, SIZE] of 0 to 1 (values beyond are clamped).

    A pixel has the nearest colour of the palette, an object is a connected component of one colour (sideways and up and
    down, not diagonally) of at least SPECK pixels, and its shape the one whose template it matches best, None below
    MATCH.
    """
    pixels = images.detach().float().cpu().clamp(0, 1).permute(0, 2, 3, 1)
    nearest = (pixels[..., None, :] - _PALETTE).square().sum(-1).argmin(-1).numpy()  # [image, row, column]
    planes = (nearest[:, None] == np.arange(1, len(_PALETTE))[:, None, None]).reshape(-1, SIZE, SIZE)
    labels, _ = ndimage.label(planes, _IN_PLANE)
    objects: list[list[PlacedShape]] = [[] for _ in images]
    for label, (plane, rows, columns) in enumerate(ndimage.find_objects(labels), start=1):
        mask = labels[plane.start, rows, columns] == label
        if mask.sum() >= SPECK:
            image, colour = divmod(plane.start, len(COLOURS))
            objects[image].append(_placed(mask, list(COLOURS)[colour], rows.start, columns.start))
    return objects


_CACHE = WeakTensorKeyDictionary()  # by image: what `read` returned, while the image is alive


def _read(samples: Sequence[Sample]) -> list[list[PlacedShape]]:
    """Returns `read` of the samples' images, cached: rewards, accuracy and guards ask for the same image."""
    images = [image_of(sample) for sample in samples]
    new = [sample for sample, pixels in zip(samples, images, strict=True) if pixels not in _CACHE]
    if new:
        for sample, objects in zip(new, read(stack_images(new, (3, SIZE, SIZE))), strict=True):
            _CACHE[image_of(sample)] = objects
    return [_CACHE[pixels] for pixels in images]


def _placed(mask: np.ndarray, colour: str, top: int, left: int) -> PlacedShape:
    """Returns the shape that fits a mask [height, width] of one colour best, None below MATCH (intersection over
    union), and its top left corner in pixels."""
    if max(mask.shape) > _FRAME - _MARGIN:
        return PlacedShape(colour, None, top, left)
    frame = np.zeros((_FRAME, _FRAME), dtype=np.float32)
    frame[_MARGIN : _MARGIN + mask.shape[0], _MARGIN : _MARGIN + mask.shape[1]] = mask
    shared = _TEMPLATES @ frame.reshape(-1)
    overlap = shared / (_TEMPLATES.sum(1) + frame.sum() - shared)
    shape, shift = divmod(int(overlap.argmax()), len(_SHIFTS))
    if overlap.max() < MATCH:
        return PlacedShape(colour, None, top, left)
    down, right = _SHIFTS[shift]
    # A drawing at the border may match best when shifted out of the image, where no object of a scene lies.
    corner = (min(max(at, 0), SIZE - OBJECT) for at in (top + down - _MARGIN, left + right - _MARGIN))
    return PlacedShape(colour, list(SHAPES)[shape], *corner)


def marks(scene: ShapeScene, objects: Sequence[PlacedShape]) -> dict[str, float]:
    """Returns how much of a scene is right, each 0 to 1; the image is right where all are 1.

    colour    of the colours named and those in the image, the share that is in both
    count     the share of phrases of whose colour there are as many objects as they say
    shape     the share of the objects of a named colour that have the shape named with it
    relation  1 where all objects of the first phrase stand so to all of the second's, and both are there (only where a
              relation is requested)
    """
    named = {phrase.colour: phrase for phrase in scene.phrases}
    by_colour = {colour: [item for item in objects if item.colour == colour] for colour in named}
    colours = {item.colour for item in objects}
    named_objects = [item for items in by_colour.values() for item in items]
    result = {
        "colour": len(named.keys() & colours) / len(named.keys() | colours),
        "count": sum(len(by_colour[colour]) == phrase.count for colour, phrase in named.items()) / len(named),
        "shape": sum(item.shape == named[item.colour].shape for item in named_objects) / max(len(named_objects), 1),
    }
    if scene.relation is not None and scene.second is not None:
        first, second = by_colour[scene.first.colour], by_colour[scene.second.colour]
        result["relation"] = float(bool(first and second) and _related(scene.relation, first, second))
    return result


def _related(relation: str, *groups: list[PlacedShape]) -> bool:
    first, second = (np.array([(item.top, item.left) for item in group]) for group in groups)
    return bool(related(relation, first, second))


class ShapesChecked:
    """Reward: 1 where the image shows exactly the requested scene (prompt.metadata["scene"]), else 0.

    With `partial` it is the mean of the `marks` instead. None for an image that holds NaN or inf. Scoring raises
    UserError for images that are not [3, SIZE, SIZE].
    """

    scope: Literal["sample"] = "sample"

    def __init__(self, *, partial: bool = False):
        self.partial = partial

    def score(self, samples: Sequence[Sample]) -> list[float | None]:
        return score_finite(samples, self._score)

    def _score(self, samples: list[Sample]) -> list[float]:
        objects = _read(samples)
        scores = [
            list(marks(s.prompt.metadata["scene"], items).values()) for s, items in zip(samples, objects, strict=True)
        ]
        return [sum(values) / len(values) if self.partial else float(min(values) == 1) for values in scores]


class ShapesRedrawn:
    """Measure: 1 minus the mean absolute difference between the image and a clean drawing of what `read` finds in it.

    It falls where an image passes the check and yet is smeared, faint or strewn with what is not an object. The image
    is clamped to 0..1 first; None for one that holds NaN or inf.
    """

    scope: Literal["sample"] = "sample"

    def score(self, samples: Sequence[Sample]) -> list[float | None]:
        return score_finite(samples, self._score)

    def _score(self, samples: list[Sample]) -> list[float]:
        images = stack_images(samples, (3, SIZE, SIZE)).clamp(0, 1)
        clean = torch.stack([draw(items) for items in _read(samples)])
        return (1 - (images - clean).abs().flatten(1).mean(1)).tolist()

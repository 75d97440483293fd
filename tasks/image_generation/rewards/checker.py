"""Recognises the shapes of an image and compares them with the requested scene. It is an exact counterpart of GenEval
(Ghosh et al. 2023, arXiv:2310.11513), which uses a detector network."""

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
    COLORS,
    OBJECT,
    SHAPES,
    SIZE,
    PlacedShape,
    ShapeScene,
    draw,
    related,
    template,
)

MIN_PIXELS = 4  # a smaller connected component of one color is noise, not an object
MIN_IOU = 0.7  # a component has a shape if its intersection over union with the shape's template is at least this
_MARGIN = 1  # maximum shift in pixels between the template and the top left corner of a component
_FRAME = OBJECT + 2 * _MARGIN  # side in pixels of the frame in which a template is shifted
_SHIFTS = list(product(range(2 * _MARGIN + 1), repeat=2))
_PALETTE = torch.tensor([(0.0, 0.0, 0.0), *COLORS.values()])  # black, then the colors of objects
# Connectivity of pixels, [plane, row, column]: neighbors in a row or column of the same plane
_IN_PLANE = np.stack([np.zeros((3, 3)), ndimage.generate_binary_structure(2, 1), np.zeros((3, 3))])


def _templates() -> np.ndarray:
    """Returns all shapes at all shifts in a frame, [shape * shift, _FRAME * _FRAME] float32, 0 or 1."""
    frames = np.zeros((len(SHAPES), len(_SHIFTS), _FRAME, _FRAME), dtype=np.float32)
    for (shape_index, shape), (shift_index, (down, right)) in product(enumerate(SHAPES), enumerate(_SHIFTS)):
        frames[shape_index, shift_index, down : down + OBJECT, right : right + OBJECT] = template(shape)
    return frames.reshape(len(SHAPES) * len(_SHIFTS), -1)


_TEMPLATES = _templates()


def find_shapes(images: Tensor) -> list[list[PlacedShape]]:
    """Returns the objects of each image. images: [image, 3, SIZE, SIZE], clamped to 0..1.

    Each pixel is assigned to the nearest color of the palette. An object is a connected component of one color, of
    at least MIN_PIXELS pixels, without diagonal connections. Its shape is the one whose template matches best; None
    below MIN_IOU.
    """
    pixels = images.detach().float().cpu().clamp(0, 1).permute(0, 2, 3, 1)
    nearest = (pixels[..., None, :] - _PALETTE).square().sum(-1).argmin(-1).numpy()  # [image, row, column]
    # one plane for each image and color; color 0 is the background
    planes = (nearest[:, None] == np.arange(1, len(_PALETTE))[:, None, None]).reshape(-1, SIZE, SIZE)
    labels, _ = ndimage.label(planes, _IN_PLANE)  # objects in different planes are not connected
    objects: list[list[PlacedShape]] = [[] for _ in images]
    for label, (plane, rows, columns) in enumerate(ndimage.find_objects(labels), start=1):
        mask = labels[plane.start, rows, columns] == label
        if mask.sum() >= MIN_PIXELS:
            image, color = divmod(plane.start, len(COLORS))
            objects[image].append(_match_shape(mask, list(COLORS)[color], rows.start, columns.start))
    return objects


_CACHE = WeakTensorKeyDictionary()  # the result of `find_shapes` for each image tensor that is still alive


def _find_cached(samples: Sequence[Sample]) -> list[list[PlacedShape]]:
    """Returns `find_shapes` of the samples' images, cached: rewards, accuracy and guards ask for the same images."""
    images = [image_of(sample) for sample in samples]
    new = [sample for sample, image in zip(samples, images, strict=True) if image not in _CACHE]
    if new:
        for sample, objects in zip(new, find_shapes(stack_images(new, (3, SIZE, SIZE))), strict=True):
            _CACHE[image_of(sample)] = objects
    return [_CACHE[image] for image in images]


def _match_shape(mask: np.ndarray, color: str, top: int, left: int) -> PlacedShape:
    """Returns the object of a connected component, with the shape that fits it best; None as its shape if the component
    is too large, or no shape reaches MIN_IOU.

    mask: [height, width] bool, the component's bounding box, whose top left corner is (top, left) in pixels.
    """
    if max(mask.shape) > _FRAME - _MARGIN:
        return PlacedShape(color, None, top, left)
    frame = np.zeros((_FRAME, _FRAME), dtype=np.float32)
    frame[_MARGIN : _MARGIN + mask.shape[0], _MARGIN : _MARGIN + mask.shape[1]] = mask
    intersection = _TEMPLATES @ frame.reshape(-1)
    iou = intersection / (_TEMPLATES.sum(1) + frame.sum() - intersection)
    shape, shift = divmod(int(iou.argmax()), len(_SHIFTS))
    if iou.max() < MIN_IOU:
        return PlacedShape(color, None, top, left)
    down, right = _SHIFTS[shift]
    # At the border the best shift may lie outside of the image, where no object of a scene is.
    corner = (min(max(start, 0), SIZE - OBJECT) for start in (top + down - _MARGIN, left + right - _MARGIN))
    return PlacedShape(color, list(SHAPES)[shape], *corner)


def part_scores(scene: ShapeScene, objects: Sequence[PlacedShape]) -> dict[str, float]:
    """Returns how well objects match a scene, as scores 0 to 1 that are all 1 if they match exactly.

    colour    intersection over union of the colors in the scene and the colors in the image
    count     the share of the scene's phrases with the right number of objects of their color
    shape     the share of objects, among those with a color of the scene, with the shape of their color's phrase
    relation  only if the scene has one: 1 if it holds for all objects of the two phrases and both have some, else 0
    """
    phrases = {phrase.color: phrase for phrase in scene.phrases}
    by_color = {color: [item for item in objects if item.color == color] for color in phrases}
    colors = {item.color for item in objects}
    right_color = [item for items in by_color.values() for item in items]
    scores = {
        "colour": len(phrases.keys() & colors) / len(phrases.keys() | colors),
        "count": sum(len(by_color[color]) == phrase.count for color, phrase in phrases.items()) / len(phrases),
        "shape": sum(item.shape == phrases[item.color].shape for item in right_color) / max(len(right_color), 1),
    }
    if scene.relation is not None and scene.second is not None:
        first, second = by_color[scene.first.color], by_color[scene.second.color]
        scores["relation"] = float(bool(first and second) and _related(scene.relation, first, second))
    return scores


def _related(relation: str, *groups: list[PlacedShape]) -> bool:
    """Returns whether all objects of the first group are in the relation to all objects of the second; see
    `shapes.related`."""
    first, second = (np.array([(item.top, item.left) for item in group]) for group in groups)
    return bool(related(relation, first, second))


class ShapesChecked:
    """Reward: 1 if the image shows exactly the requested scene (prompt.metadata["scene"]), else 0.

    With `partial` it is the mean of `part_scores` instead. None for an image that holds NaN or inf. Scoring raises
    UserError for images that are not [3, SIZE, SIZE].
    """

    scope: Literal["sample"] = "sample"

    def __init__(self, *, partial: bool = False):
        self.partial = partial

    def score(self, samples: Sequence[Sample]) -> list[float | None]:
        return score_finite(samples, self._score)

    def _score(self, samples: list[Sample]) -> list[float]:
        """Returns the rewards of samples whose images are finite: 1 or 0, or with `partial` the mean of
        `part_scores`."""
        rewards = []
        for sample, objects in zip(samples, _find_cached(samples), strict=True):
            scores = list(part_scores(sample.prompt.metadata["scene"], objects).values())
            rewards.append(sum(scores) / len(scores) if self.partial else float(min(scores) == 1))
        return rewards


class ShapesRedrawn:
    """Reward: 1 minus the mean absolute difference between the image and a clean drawing of the objects found in it.

    As a guard it falls if images pass `ShapesChecked` but are blurred, faint or noisy. The image is clamped to 0..1
    first; None for one that holds NaN or inf.
    """

    scope: Literal["sample"] = "sample"

    def score(self, samples: Sequence[Sample]) -> list[float | None]:
        return score_finite(samples, self._score)

    def _score(self, samples: list[Sample]) -> list[float]:
        images = stack_images(samples, (3, SIZE, SIZE)).clamp(0, 1)
        clean = torch.stack([draw(items) for items in _find_cached(samples)])
        return (1 - (images - clean).abs().flatten(1).mean(1)).tolist()

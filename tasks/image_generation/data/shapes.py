"""Prompts that ask for scenes of colored shapes, and drawings of such scenes.

A prompt names a count, a color and a shape, and optionally a relation to one object of another color: "two green
triangles", "three red circles left of a blue square".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from mmrl.rollouts import Prompt

SIZE = 16  # pixels along a side of an image
OBJECT = 4  # pixels along a side of an object
GRID = (1, 6, 11)  # rows and columns of the top left corners of objects on the grid
GAP = 1  # minimum number of black pixels between two objects, horizontally or vertically
# Corners of the RGB cube: a pixel between black and one of them is nearest to one of these two, not to a third color.
COLORS = {
    "red": (1.0, 0.0, 0.0),
    "green": (0.0, 1.0, 0.0),
    "blue": (0.0, 0.0, 1.0),
    "yellow": (1.0, 1.0, 0.0),
    "purple": (1.0, 0.0, 1.0),
    "white": (1.0, 1.0, 1.0),
}
SHAPES = {
    "square": ("####", "####", "####", "####"),
    "circle": (".##.", "####", "####", ".##."),
    "triangle": ("#...", "##..", "###.", "####"),
}
COUNTS = ("a", "two", "three", "four")
RELATIONS = ("left of", "right of", "above", "below")  # index ^ 1 is the opposite
KINDS = ("count", "relation")
SPLITS = ("train", "heldout", "all")
T = TypeVar("T")
Split = Literal["train", "heldout", "all"]
Layout = Literal["free", "grid", "row"]


@dataclass(frozen=True)
class Phrase:
    """A phrase of a prompt, such as "two red circles": `count` objects of one color and shape."""

    count: int
    color: str
    shape: str

    def __str__(self) -> str:
        return f"{COUNTS[self.count - 1]} {self.color} {self.shape}{'s' if self.count > 1 else ''}"


@dataclass(frozen=True)
class ShapeScene:
    """The scene that a prompt asks for: the objects of `first`, optionally in a relation to those of `second`."""

    first: Phrase
    relation: str | None = None
    second: Phrase | None = None

    def __str__(self) -> str:
        return str(self.first) if self.second is None else f"{self.first} {self.relation} {self.second}"

    @property
    def phrases(self) -> tuple[Phrase, ...]:
        return (self.first,) if self.second is None else (self.first, self.second)


@dataclass(frozen=True)
class PlacedShape:
    """An object of an image: its color, its shape (None: not one of SHAPES), and the row and column of its top left
    corner in pixels."""

    color: str
    shape: str | None
    top: int
    left: int


@cache
def template(shape: str) -> np.ndarray:
    """Returns the pixels of a shape, [OBJECT, OBJECT] bool."""
    return np.array([[pixel == "#" for pixel in row] for row in SHAPES[shape]])


def words() -> list[str]:
    """Returns all words of the prompts, sorted."""
    plurals = {f"{shape}s" for shape in SHAPES}
    return sorted({*COUNTS, *COLORS, *SHAPES, *plurals, *(word for r in RELATIONS for word in r.split())})


def scenes(split: Split, kind: str, colours: Sequence[str], max_count: int = len(COUNTS)) -> list[ShapeScene]:
    """Returns all scenes of a split; the split depends on no seed.

    kind: "count" (one phrase) or "relation" (two). A scene is held out if the indices of its parts sum to 3 modulo 4.
    That is a quarter of all scenes; each count, color, shape and relation is in many training scenes. Split "all" has
    training and held-out scenes, for supervised training of a base model.
    """
    color_names, indexed = list(COLORS), []
    for count, color, (shape_index, shape) in product(range(1, max_count + 1), colours, enumerate(SHAPES)):
        first, index = Phrase(count, color, shape), count + color_names.index(color) + shape_index
        if kind == "count":
            indexed.append((index, ShapeScene(first)))
            continue
        seconds = product(enumerate(RELATIONS), colours, enumerate(SHAPES))
        for (relation_index, relation), second_color, (second_index, second_shape) in seconds:
            if second_color != color:
                scene = ShapeScene(first, relation, Phrase(1, second_color, second_shape))
                indexed.append((index + relation_index + color_names.index(second_color) + second_index, scene))
    return [scene for index, scene in indexed if split == "all" or (index % 4 == 3) == (split == "heldout")]


def related(relation: str, first: np.ndarray, second: np.ndarray, min_distance: float = OBJECT / 2 + 0.5) -> np.ndarray:
    """Returns whether all objects of `first` are in the relation to all objects of `second`, [...] bool.

    first, second: rows and columns of the top left corners of objects of one size, [..., object, 2]. min_distance:
    minimum distance of two corners in pixels, along the axis of the relation.
    """
    # Axis (0: row, 1: column), and the sign of `second` - `first` along it
    axis, sign = {"left of": (1, 1), "right of": (1, -1), "above": (0, 1), "below": (0, -1)}[relation]
    distances = sign * (second[..., None, :, axis] - first[..., :, None, axis])
    return distances.min((-2, -1)) >= min_distance


def place_objects(scene: ShapeScene, rng: np.random.Generator, layout: Layout = "free") -> list[PlacedShape]:
    """Samples positions for the objects of a scene, such that its relation holds and all gaps are at least GAP pixels.

    layout: "grid" uses a grid of 3 x 3 positions only, "row" also puts the objects of a phrase in one row of it. The
    fewer positions there are, the sooner a small model learns to count.
    """
    # The object of `second` is placed first
    to_place = [phrase for phrase in reversed(scene.phrases) for _ in range(phrase.count)]
    while True:
        corners = np.ones(SIZE - OBJECT + 1, dtype=bool)
        if layout != "free":
            corners = np.isin(np.arange(SIZE - OBJECT + 1), GRID)
        free = np.outer(corners, corners)  # possible top left corners, [row, column]
        placed: list[PlacedShape] = []
        # with layout "row", the row of each phrase
        rows = {phrase: rng.choice(GRID) for phrase in scene.phrases} if layout == "row" else {}
        for phrase in to_place:
            # Once the object of `second` is drawn, only corners in the right relation to it are possible for `first`.
            if phrase is scene.first and scene.relation is not None and len(placed) == 1:
                free &= _corners_in_relation(scene.relation, placed[0])
            candidates = np.flatnonzero(free)
            if phrase in rows:
                candidates = candidates[candidates // len(free) == rows[phrase]]
            if not len(candidates):
                break  # no position is left: try again
            top, left = divmod(int(candidates[rng.integers(len(candidates))]), len(free))
            reach = OBJECT + GAP - 1
            free[max(0, top - reach) : top + reach + 1, max(0, left - reach) : left + reach + 1] = False
            placed.append(PlacedShape(phrase.color, phrase.shape, top, left))
        else:
            return placed


def _corners_in_relation(relation: str, other: PlacedShape) -> np.ndarray:
    """Returns the top left corners at which an object is in the relation to `other`, [row, column] bool."""
    corners = np.moveaxis(np.indices((SIZE - OBJECT + 1,) * 2), 0, -1)
    return related(relation, corners[..., None, :], np.array([(other.top, other.left)]), min_distance=OBJECT)


def draw(objects: Sequence[PlacedShape]) -> Tensor:
    """Draws objects on black, [3, SIZE, SIZE] float32, 0 to 1. Objects whose shape is None are left out."""
    image = np.zeros((SIZE, SIZE, 3), dtype=np.float32)
    for item in objects:
        if item.shape is not None:
            window = image[item.top : item.top + OBJECT, item.left : item.left + OBJECT]
            window[template(item.shape)] = COLORS[item.color]
    return torch.from_numpy(image).permute(2, 0, 1).contiguous()


def with_wrong_part(scene: ShapeScene, rng: np.random.Generator, colours: Sequence[str], max_count: int) -> ShapeScene:
    """Returns the scene with another color, shape or count in its first phrase, or with the opposite relation. No image
    shows the scene before and the scene after this change."""
    first, parts = scene.first, ["colour", "shape"]
    parts += ["count"] * (max_count > 1) + ["relation"] * (scene.relation is not None)
    part = str(rng.choice(parts))

    def other(values: Iterable[T], *excluded: T) -> T:
        """Selects one of the values at random that is not excluded."""
        remaining = [value for value in values if value not in excluded]
        return remaining[rng.integers(len(remaining))]

    if part == "relation":  # in RELATIONS a relation and its opposite are neighbours: 0 and 1, 2 and 3
        return replace(scene, relation=RELATIONS[RELATIONS.index(str(scene.relation)) ^ 1])
    if part == "count":
        return replace(scene, first=replace(first, count=other(range(1, max_count + 1), first.count)))
    if part == "shape":
        return replace(scene, first=replace(first, shape=other(SHAPES, first.shape)))
    used = [phrase.color for phrase in scene.phrases]
    # a color that no phrase has; if `colours` has no other, one of the whole palette
    color = other(colours if len(colours) > len(used) else COLORS, *used)
    return replace(scene, first=replace(first, color=color))


class ShapesSource:
    """`size` prompts for scenes; item i depends on (split, seed, i) and the options only.

    Splits "train" and "heldout" have no scene in common (see `scenes`), "all" has both. Item i is of kind
    `kinds[i % len(kinds)]`. Metadata: `kind`, `scene` and `target`, an image for supervised training, [3, SIZE, SIZE]
    float32, 0 to 1, of which one part is wrong in the share `wrong_share` (see `with_wrong_part`).

    Raises ValueError if the options leave no scene of a kind, or more objects than fit into a row.
    """

    def __init__(
        self,
        split: Split = "train",
        *,
        size: int,
        seed: int,
        kinds: Sequence[str] = KINDS,
        colours: Sequence[str] = tuple(COLORS),
        max_count: int = len(COUNTS),
        wrong_share: float = 0.0,
        layout: Layout = "free",
    ):
        self.split, self.size, self.seed, self.kinds, self.layout = split, size, seed, tuple(kinds), layout
        self.colours, self.max_count, self.wrong_share = tuple(colours), max_count, wrong_share
        self._pools = [scenes(split, kind, self.colours, max_count) for kind in self.kinds]
        empty = [kind for kind, pool in zip(self.kinds, self._pools, strict=True) if not pool]
        if empty:
            raise ValueError(
                f"no {split} scene of kind {empty[0]!r} with colours {', '.join(colours)} and max_count={max_count}; "
                "add colours, or raise max_count"
            )
        row_capacity = len(GRID) - ("relation" in self.kinds)  # the second object may be in the same row
        if layout == "row" and max_count > row_capacity:
            raise ValueError(
                f"layout=row has room for {row_capacity} objects of these kinds in a row, not max_count={max_count}; "
                "lower max_count, or use layout=grid"
            )

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Prompt:
        """Returns prompt `index`, which is random but determined by the split, the seed and `index`. With the
        probability `wrong_share` its target image shows another scene than its text. Its metadata: see the class."""
        if not 0 <= index < self.size:
            raise IndexError(f"index {index} is out of range: there are {self.size} prompts")
        rng = np.random.default_rng([SPLITS.index(self.split), self.seed, index])
        kind_index = index % len(self.kinds)
        pool = self._pools[kind_index]
        scene = pool[rng.integers(len(pool))]
        is_wrong = rng.random() < self.wrong_share
        drawn_scene = with_wrong_part(scene, rng, self.colours, self.max_count) if is_wrong else scene
        target = draw(place_objects(drawn_scene, rng, self.layout))
        return Prompt(
            id=f"shapes-{self.split}-{self.seed}-{index}",
            text=str(scene),
            metadata={"kind": self.kinds[kind_index], "scene": scene, "target": target},
        )

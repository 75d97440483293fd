"""Scenes of coloured shapes and the sentences that ask for them: the grammar, the drawing, and prompts by index.

A sentence names a count, a colour and a shape, and may put them left of, right of, above or below one object of another
colour: "two green triangles", "three red circles left of a blue square".
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

SIZE = 16  # pixels a side
OBJECT = 4  # pixels a side of an object
GRID = (1, 6, 11)  # rows and columns of the top left of objects on the grid
GAP = 1  # black pixels at least between two objects, sideways or up and down
# Corners of the RGB cube on black: a pixel on the way from black to a colour is nearest to one of the two.
COLOURS = {
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
RELATIONS = ("left of", "right of", "above", "below")  # each beside its opposite
KINDS = ("count", "relation")
SPLITS = ("train", "heldout", "all")
T = TypeVar("T")
Split = Literal["train", "heldout", "all"]
Layout = Literal["free", "grid", "row"]


@dataclass(frozen=True)
class Phrase:
    """`count` objects of one colour and shape."""

    count: int
    colour: str
    shape: str

    def __str__(self) -> str:
        return f"{COUNTS[self.count - 1]} {self.colour} {self.shape}{'s' if self.count > 1 else ''}"


@dataclass(frozen=True)
class ShapeScene:
    """The scene that a sentence asks for: `first`, which stands in `relation` to `second` where there is one."""

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
    """An object of an image: its colour, its shape (None where it is none of SHAPES), row and column of its top
    left."""

    colour: str
    shape: str | None
    top: int
    left: int


@cache
def template(shape: str) -> np.ndarray:
    """Returns the pixels of a shape, [OBJECT, OBJECT] bool."""
    return np.array([[pixel == "#" for pixel in row] for row in SHAPES[shape]])


def words() -> list[str]:
    """Returns every word of every sentence, sorted."""
    plurals = {f"{shape}s" for shape in SHAPES}
    return sorted({*COUNTS, *COLOURS, *SHAPES, *plurals, *(word for r in RELATIONS for word in r.split())})


def scenes(split: Split, kind: str, colours: Sequence[str], max_count: int = len(COUNTS)) -> list[ShapeScene]:
    """Returns all scenes of a split, whatever the seed.

    A combination is held out where the indices of its parts sum to 3 modulo 4: a quarter of all, while each count,
    colour, shape and relation is trained on in many others. "all" is both, for a base that has seen every combination.
    """
    named, indexed = list(COLOURS), []
    for count, colour, (s, shape) in product(range(1, max_count + 1), colours, enumerate(SHAPES)):
        first, index = Phrase(count, colour, shape), count + named.index(colour) + s
        if kind == "count":
            indexed.append((index, ShapeScene(first)))
            continue
        for (r, relation), other, (o, second) in product(enumerate(RELATIONS), colours, enumerate(SHAPES)):
            if other != colour:
                scene = ShapeScene(first, relation, Phrase(1, other, second))
                indexed.append((index + r + named.index(other) + o, scene))
    return [scene for index, scene in indexed if split == "all" or (index % 4 == 3) == (split == "heldout")]


def related(relation: str, first: np.ndarray, second: np.ndarray, by: float = OBJECT / 2 + 0.5) -> np.ndarray:
    """Returns whether all of `first` stand in the relation to all of `second`, their centres at least `by` pixels apart
    on its axis, [...] bool; first, second: rows and columns of equally large objects, [..., object, 2].
    """
    axis, sign = {"left of": (1, 1), "right of": (1, -1), "above": (0, 1), "below": (0, -1)}[relation]
    steps = sign * (second[..., None, :, axis] - first[..., :, None, axis])
    return steps.min((-2, -1)) >= by


def place_objects(scene: ShapeScene, rng: np.random.Generator, layout: Layout = "free") -> list[PlacedShape]:
    """Draws positions for the objects of a scene, all at least GAP apart and `first` wholly on its side of `second`.

    "grid" puts them on a grid of 3 x 3, "row" those of a phrase in one row of it: a small model learns to count them
    the faster, the fewer positions they may have.
    """
    wanted = [phrase for phrase in reversed(scene.phrases) for _ in range(phrase.count)]  # the second leaves room first
    while True:
        corners = np.ones(SIZE - OBJECT + 1, dtype=bool)
        if layout != "free":
            corners = np.isin(np.arange(SIZE - OBJECT + 1), GRID)
        free = np.outer(corners, corners)  # top left corners that an object may have
        placed: list[PlacedShape] = []
        rows = {phrase: rng.choice(GRID) for phrase in scene.phrases} if layout == "row" else {}
        for phrase in wanted:
            if phrase is scene.first and scene.relation is not None and len(placed) == 1:
                free &= _side(scene.relation, placed[0])
            candidates = np.flatnonzero(free)
            if phrase in rows:
                candidates = candidates[candidates // len(free) == rows[phrase]]
            if not len(candidates):
                break  # a dead end: begin again
            top, left = divmod(int(candidates[rng.integers(len(candidates))]), len(free))
            reach = OBJECT + GAP - 1
            free[max(0, top - reach) : top + reach + 1, max(0, left - reach) : left + reach + 1] = False
            placed.append(PlacedShape(phrase.colour, phrase.shape, top, left))
        else:
            return placed


def _side(relation: str, other: PlacedShape) -> np.ndarray:
    """Returns the corners from which an object lies wholly in the relation to `other`, [row, column] bool."""
    corners = np.moveaxis(np.indices((SIZE - OBJECT + 1,) * 2), 0, -1)
    return related(relation, corners[..., None, :], np.array([(other.top, other.left)]), by=OBJECT)


def draw(objects: Sequence[PlacedShape]) -> Tensor:
    """Draws the image of objects on black, [3, SIZE, SIZE] float32, 0 to 1; an object without a shape is left out."""
    image = np.zeros((SIZE, SIZE, 3), dtype=np.float32)
    for item in objects:
        if item.shape is not None:
            window = image[item.top : item.top + OBJECT, item.left : item.left + OBJECT]
            window[template(item.shape)] = COLOURS[item.colour]
    return torch.from_numpy(image).permute(2, 0, 1).contiguous()


def spoiled(scene: ShapeScene, rng: np.random.Generator, colours: Sequence[str], max_count: int) -> ShapeScene:
    """Returns the scene with one thing of its first phrase changed, or its relation turned round: no image shows
    both."""
    first, kinds = scene.first, ["colour", "shape"]
    kinds += ["count"] * (max_count > 1) + ["relation"] * (scene.relation is not None)
    kind = str(rng.choice(kinds))

    def other(values: Iterable[T], *taken: T) -> T:
        rest = [value for value in values if value not in taken]
        return rest[rng.integers(len(rest))]

    if kind == "relation":
        return replace(scene, relation=RELATIONS[RELATIONS.index(str(scene.relation)) ^ 1])
    if kind == "count":
        return replace(scene, first=replace(first, count=other(range(1, max_count + 1), first.count)))
    if kind == "shape":
        return replace(scene, first=replace(first, shape=other(SHAPES, first.shape)))
    taken = [phrase.colour for phrase in scene.phrases]
    return replace(scene, first=replace(first, colour=other(colours if len(colours) > len(taken) else COLOURS, *taken)))


class ShapesSource:
    """`size` prompts for scenes; item i depends on (split, seed, i) and the options, on nothing else.

    Prompts of "train" and "heldout" are made of disjoint combinations (see `scenes`), those of "all" of either's. Item
    i is of kind `kinds[i % len(kinds)]`. Metadata: `kind`, `scene` and `target`, an image for supervised training, [3,
    SIZE, SIZE] float32, 0 to 1, which for the share `careless` has one thing wrong.

    Raises ValueError where the options leave no scene of a kind, or no room for one in a row.
    """

    def __init__(
        self,
        split: Split = "train",
        *,
        size: int,
        seed: int,
        kinds: Sequence[str] = KINDS,
        colours: Sequence[str] = tuple(COLOURS),
        max_count: int = len(COUNTS),
        careless: float = 0.0,
        layout: Layout = "free",
    ):
        self.split, self.size, self.seed, self.kinds, self.layout = split, size, seed, tuple(kinds), layout
        self.colours, self.max_count, self.careless = tuple(colours), max_count, careless
        self._pools = [scenes(split, kind, self.colours, max_count) for kind in self.kinds]
        empty = [kind for kind, pool in zip(self.kinds, self._pools, strict=True) if not pool]
        if empty:
            raise ValueError(
                f"no {split} scene of kind {empty[0]!r} with colours {', '.join(colours)} and max_count={max_count}; "
                "allow more of them"
            )
        room = len(GRID) - ("relation" in self.kinds)  # of one row, beside an object to the left or right
        if layout == "row" and max_count > room:
            raise ValueError(
                f"layout=row has room for {room} objects of these kinds in a row, not max_count={max_count}"
            )

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < self.size:
            raise IndexError(f"item {index} of {self.size}")
        rng = np.random.default_rng([SPLITS.index(self.split), self.seed, index])
        kind, pool = index % len(self.kinds), self._pools[index % len(self.kinds)]
        scene = pool[rng.integers(len(pool))]
        careless = rng.random() < self.careless
        shown = spoiled(scene, rng, self.colours, self.max_count) if careless else scene
        return Prompt(
            id=f"shapes-{self.split}-{self.seed}-{index}",
            text=str(scene),
            metadata={"kind": self.kinds[kind], "scene": scene, "target": draw(place_objects(shown, rng, self.layout))},
        )

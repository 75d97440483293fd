"""Instructions for drawn scenes, such as "make the bar blue" or "remove the square": the source image, what it shall
become, and an exact reading of what was done to it.

A scene is two objects on black, of different shapes, each of 2 x 2 cells of CELL x CELL pixels: a patch of
FLUX. One is to be given another colour or to be taken away; all else shall stay. Every cell is one of five colours, so
that what has changed and what has not is known without error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import permutations
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mmrl.errors import UserError
from mmrl.rewards.types import score_finite
from mmrl.rollouts import Prompt, Sample
from mmrl.tasks.image_generation.data.images import stack_images

SIZE, CELL = 16, 2
GRID, OBJECT = SIZE // CELL, 2  # cells a side, of the image and of an object
COLOURS = {"red": (1.0, 0.0, 0.0), "green": (0.0, 1.0, 0.0), "blue": (0.0, 0.0, 1.0), "yellow": (1.0, 1.0, 0.0)}
SHAPES = {"square": ("##", "##"), "bar": ("##", ".."), "stair": ("#.", ".#")}
MOVED = 0.25  # difference of a channel from which an untouched pixel counts as moved
SPLITS = ("train", "heldout", "all")
Split = Literal["train", "heldout", "all"]
Part = Literal["changed", "kept"]


@dataclass(frozen=True)
class Item:
    """An object of a scene; top and left in cells."""

    shape: str
    colour: str
    top: int = 0
    left: int = 0


@dataclass(frozen=True)
class Edit:
    """An instruction to recolour the object of this shape or, where `colour` is None, to remove it."""

    shape: str
    colour: str | None

    def __str__(self) -> str:
        return f"remove the {self.shape}" if self.colour is None else f"make the {self.shape} {self.colour}"

    def applied(self, scene: Sequence[Item]) -> list[Item]:
        """Returns the scene after the edit."""
        changed = [Item(i.shape, self.colour or i.colour, i.top, i.left) if i.shape == self.shape else i for i in scene]
        return [i for i in changed if self.colour is not None or i.shape != self.shape]


def words() -> list[str]:
    """Returns every word of the instructions, sorted."""
    return sorted({"make", "remove", "the", *COLOURS, *SHAPES})


Kind = tuple[
    str, str, str, str, str | None
]  # shape and colour of the object to edit, of the other, and the edit's colour


@cache
def kinds(split: Split) -> tuple[Kind, ...]:
    """Returns every edit of every pair of objects: held out where the indices of its parts sum to 3 modulo 4."""
    shapes, colours = list(SHAPES), list(COLOURS)
    selected = []
    for first, second in permutations(shapes, 2):
        for first_colour in colours:
            for second_colour in colours:
                for goal in (*colours, None):
                    if goal == first_colour:
                        continue
                    indices = (
                        shapes.index(first),
                        shapes.index(second),
                        colours.index(first_colour),
                        colours.index(second_colour),
                    )
                    heldout = (sum(indices) + (len(colours) if goal is None else colours.index(goal))) % 4 == 3
                    if split == "all" or heldout == (split == "heldout"):
                        selected.append((first, first_colour, second, second_colour, goal))
    return tuple(selected)


def draw(scene: Sequence[Item]) -> Tensor:
    """Draws a scene, [3, SIZE, SIZE] float32, 0 to 1."""
    cells = torch.zeros(3, GRID, GRID)
    for item in scene:
        mask = torch.tensor([[mark == "#" for mark in row] for row in SHAPES[item.shape]])
        window = cells[:, item.top : item.top + OBJECT, item.left : item.left + OBJECT]
        window[:, mask] = torch.tensor(COLOURS[item.colour])[:, None]
    return cells.repeat_interleave(CELL, 1).repeat_interleave(CELL, 2)


def random_corners(rng: np.random.Generator) -> tuple[tuple[int, int], tuple[int, int]]:
    """Draws the top left corners of two objects, in cells, on a grid whose squares are as large as the objects."""
    side = GRID // OBJECT
    first, second = (divmod(int(q), side) for q in rng.choice(side**2, 2, replace=False))
    return (OBJECT * first[0], OBJECT * first[1]), (OBJECT * second[0], OBJECT * second[1])


class EditedShapes:
    """`size` prompts, each with a source image; item i depends on (split, seed, i) and `careless` alone. Metadata:
    `before` and `wanted` [3, SIZE, SIZE], `region` [SIZE, SIZE] bool, where these differ, `kind`, and `target`, the
    image to learn from, which for the share `careless` is another edit of the same source."""

    def __init__(self, split: Split, *, size: int, seed: int, careless: float = 0.0) -> None:
        self.split, self.size, self.seed, self.careless = split, size, seed, careless

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < self.size:
            raise IndexError(f"item {index} of {self.size}")
        rng = np.random.default_rng([SPLITS.index(self.split), self.seed, index])
        pool = kinds(self.split)
        first, first_colour, second, second_colour, goal = pool[rng.integers(len(pool))]
        first_corner, second_corner = random_corners(rng)
        scene = [Item(first, first_colour, *first_corner), Item(second, second_colour, *second_corner)]
        edit = Edit(first, goal)
        shown = edit
        if rng.random() < self.careless:
            wrong = [Edit(shape, colour) for shape in (first, second) for colour in (*COLOURS, None)]
            shown = [w for w in wrong if w != edit][rng.integers(len(wrong) - 1)]
        before, wanted = draw(scene), draw(edit.applied(scene))
        pixels = (before * 255).round().byte().permute(1, 2, 0).contiguous().numpy()
        metadata: dict[str, Any] = {
            "kind": "remove" if goal is None else "recolour",
            "before": before,
            "wanted": wanted,
            "region": (before != wanted).any(0),
            "target": draw(shown.applied(scene)),
        }
        name = f"edits-{self.split}-{self.seed}-{index}"
        return Prompt(id=name, text=str(edit), images=(Image.fromarray(pixels),), metadata=metadata)


_PALETTE = torch.tensor([(0.0, 0.0, 0.0), *COLOURS.values()])


def read(images: Tensor) -> Tensor:
    """Returns the index of the nearest colour of the palette for every cell, [image, GRID, GRID]; images are [image, 3,
    SIZE, SIZE]."""
    cells = images.float().clamp(0, 1).unflatten(3, (GRID, CELL)).unflatten(2, (GRID, CELL)).mean((3, 5))
    return (cells.permute(0, 2, 3, 1)[..., None, :] - _PALETTE).square().sum(-1).argmin(-1)


def marks(images: Tensor, before: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the fractions of cells that are as they should be, [image] each: of those that should change, and of the
    others."""
    actual, source, expected = read(images), read(before), read(wanted)
    right, touched = (actual == expected).float().flatten(1), (source != expected).float().flatten(1)
    return (right * touched).sum(1) / touched.sum(1).clamp(min=1), (right * (1 - touched)).sum(1) / (1 - touched).sum(
        1
    ).clamp(min=1)


class EditChecked:
    """Reward: 1 where the image is exactly what the instruction makes of its source, in every cell, else 0.

    `part` gives a share instead: "changed" of the cells that should change, "kept" of those that should not. None for
    an image that holds NaN or inf. Raises UserError for images of another size and prompts without `wanted`.
    """

    scope: Literal["sample"] = "sample"

    def __init__(self, *, part: Part | None = None) -> None:
        if part not in (None, "changed", "kept"):
            raise ValueError(f"part must be changed or kept, not {part!r}")
        self.part = part

    def score(self, samples: Sequence[Sample]) -> list[float | None]:
        return score_finite(samples, self._score)

    def _score(self, samples: list[Sample]) -> list[float]:
        images = stack_images(samples, (3, SIZE, SIZE))
        changed, preserved = marks(images, _metadata(samples, "before"), _metadata(samples, "wanted"))
        if self.part is not None:
            return (changed if self.part == "changed" else preserved).tolist()
        return ((changed == 1) & (preserved == 1)).float().tolist()


def untouched_moved(samples: Sequence[Sample]) -> Tensor:
    """Guard: the share of pixels that should have stayed and did not, [sample]: some channel is MOVED or more away."""
    images = stack_images(samples).float().clamp(0, 1)
    before, wanted = _metadata(samples, "before"), _metadata(samples, "wanted")
    stays = ((before - wanted).abs().amax(1) == 0).flatten(1).float()
    moved = ((images - before).abs().amax(1) >= MOVED).flatten(1).float()
    return (moved * stays).sum(1) / stays.sum(1).clamp(min=1)


def region_distance(samples: Sequence[Sample]) -> Tensor:
    """Mean squared distance to the source over what should have stayed, [sample]: CoCoEdit's region-preserving term
    with a known region."""
    images = stack_images(samples).float().clamp(0, 1)
    before, wanted = _metadata(samples, "before"), _metadata(samples, "wanted")
    stays = ((before - wanted).abs().amax(1, keepdim=True) == 0).float()
    return ((images - before).square() * stays).flatten(1).sum(1) / (3 * stays.flatten(1).sum(1)).clamp(min=1)


class RegionKept:
    """Reward: minus `region_distance`."""

    scope: Literal["sample"] = "sample"

    def score(self, samples: Sequence[Sample]) -> list[float | None]:
        return score_finite(samples, lambda finite: (-region_distance(finite)).tolist())


def _metadata(samples: Sequence[Sample], name: str) -> Tensor:
    missing = next((s.prompt.id for s in samples if name not in s.prompt.metadata), None)
    if missing is not None:
        raise UserError(f"prompt {missing!r} has no metadata[{name!r}], which this reward compares the edit with")
    return torch.stack([sample.prompt.metadata[name] for sample in samples])

"""Instructions to edit synthetic scenes, such as "make the bar blue" or "remove the square", and exact rewards.

A scene has two objects of different shapes on black. Each is 2 x 2 cells of CELL x CELL pixels; a cell is a patch of
FLUX. The instruction recolors or removes one object. Each cell has one of five colors, so that an edited image can be
compared with the expected one without error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import permutations, product
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
GRID, OBJECT = SIZE // CELL, 2  # cells along a side of the image and of an object
COLORS = {"red": (1.0, 0.0, 0.0), "green": (0.0, 1.0, 0.0), "blue": (0.0, 0.0, 1.0), "yellow": (1.0, 1.0, 0.0)}
SHAPES = {"square": ("##", "##"), "bar": ("##", ".."), "stair": ("#.", ".#")}
CHANGE_THRESHOLD = 0.25  # a pixel counts as changed if some channel differs by at least this
SPLITS = ("train", "heldout", "all")
Split = Literal["train", "heldout", "all"]
Part = Literal["changed", "kept"]


@dataclass(frozen=True)
class Item:
    """An object of a scene; top and left in cells."""

    shape: str
    color: str
    top: int = 0
    left: int = 0


@dataclass(frozen=True)
class Edit:
    """An instruction to recolor the object of this shape, or to remove it if `color` is None."""

    shape: str
    color: str | None

    def __str__(self) -> str:
        return f"remove the {self.shape}" if self.color is None else f"make the {self.shape} {self.color}"

    def apply(self, scene: Sequence[Item]) -> list[Item]:
        """Returns the scene after the edit: the object of its shape has the new color, or is removed if that is
        None."""
        edited = []
        for item in scene:
            if item.shape != self.shape:
                edited.append(item)
            elif self.color is not None:
                edited.append(replace(item, color=self.color))
        return edited


def words() -> list[str]:
    """Returns all words of the instructions, sorted."""
    return sorted({"make", "remove", "the", *COLORS, *SHAPES})


# shape and color of the object to edit, shape and color of the other object, new color (None: the object is removed)
Combination = tuple[str, str, str, str, str | None]


@cache
def combinations(split: Split) -> tuple[Combination, ...]:
    """Returns all edits in a split: the first of two objects gets a new color, or is removed (None).

    An edit is held out if the indices of its two shapes and three colors (None counts as the last color) sum to 3
    modulo 4, so the split needs no seed.
    """
    shapes, colors = list(SHAPES), list(COLORS)
    selected = []
    for (first, second), first_color, second_color in product(permutations(shapes, 2), colors, colors):
        for new_color in (*colors, None):
            if new_color == first_color:
                continue
            indices = [shapes.index(first), shapes.index(second), colors.index(first_color), colors.index(second_color)]
            indices.append(len(colors) if new_color is None else colors.index(new_color))
            heldout = sum(indices) % 4 == 3
            if split == "all" or heldout == (split == "heldout"):
                selected.append((first, first_color, second, second_color, new_color))
    return tuple(selected)


def draw(scene: Sequence[Item]) -> Tensor:
    """Draws a scene, [3, SIZE, SIZE] float32, 0 to 1."""
    cells = torch.zeros(3, GRID, GRID)
    for item in scene:
        mask = torch.tensor([[character == "#" for character in row] for row in SHAPES[item.shape]])
        window = cells[:, item.top : item.top + OBJECT, item.left : item.left + OBJECT]
        window[:, mask] = torch.tensor(COLORS[item.color])[:, None]
    return cells.repeat_interleave(CELL, 1).repeat_interleave(CELL, 2)


def random_corners(rng: np.random.Generator) -> tuple[tuple[int, int], tuple[int, int]]:
    """Samples the top left corners (row, column) of two objects in cells, such that they do not overlap."""
    # Both are squares of a coarse grid whose squares are as large as an object; two squares are drawn without repeat.
    side = GRID // OBJECT
    first, second = (divmod(int(square), side) for square in rng.choice(side**2, 2, replace=False))
    return (OBJECT * first[0], OBJECT * first[1]), (OBJECT * second[0], OBJECT * second[1])


class EditedShapes:
    """`size` instructions, each with a source image; item i depends on (split, seed, i) and `wrong_share` only.

    Metadata: `source` and `expected`, the images before and after the edit, [3, SIZE, SIZE] float32, 0 to 1; `region`,
    the pixels where these differ, [SIZE, SIZE] bool; `kind`, remove or recolour; and `target`, the image for supervised
    training, which in the share `wrong_share` is another edit of the same source.
    """

    def __init__(self, split: Split, *, size: int, seed: int, wrong_share: float = 0.0) -> None:
        self.split, self.size, self.seed, self.wrong_share = split, size, seed, wrong_share

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Prompt:
        """Returns prompt `index`, which is random but determined by the split, the seed and `index`. With the
        probability `wrong_share` its target is the image after another edit. Its metadata: see the class."""
        if not 0 <= index < self.size:
            raise IndexError(f"index {index} is out of range: there are {self.size} prompts")
        rng = np.random.default_rng([SPLITS.index(self.split), self.seed, index])
        pool = combinations(self.split)
        first, first_color, second, second_color, new_color = pool[rng.integers(len(pool))]
        first_corner, second_corner = random_corners(rng)
        scene = [Item(first, first_color, *first_corner), Item(second, second_color, *second_corner)]
        edit = target_edit = Edit(first, new_color)
        if rng.random() < self.wrong_share:
            edits = [Edit(shape, color) for shape in (first, second) for color in (*COLORS, None)]
            wrong_edits = [other for other in edits if other != edit]
            target_edit = wrong_edits[rng.integers(len(wrong_edits))]
        source, expected = draw(scene), draw(edit.apply(scene))
        pixels = (source * 255).round().byte().permute(1, 2, 0).contiguous().numpy()
        metadata: dict[str, Any] = {
            "kind": "remove" if new_color is None else "recolour",
            "source": source,
            "expected": expected,
            "region": (source != expected).any(0),
            "target": draw(target_edit.apply(scene)),
        }
        prompt_id = f"edits-{self.split}-{self.seed}-{index}"
        return Prompt(id=prompt_id, text=str(edit), images=(Image.fromarray(pixels),), metadata=metadata)


_PALETTE = torch.tensor([(0.0, 0.0, 0.0), *COLORS.values()])  # black, then the colors of objects


def read_cells(images: Tensor) -> Tensor:
    """Returns the color of each cell as an index into _PALETTE, [image, GRID, GRID]. images: [image, 3, SIZE, SIZE]."""
    cells = images.float().clamp(0, 1).unflatten(3, (GRID, CELL)).unflatten(2, (GRID, CELL)).mean((3, 5))
    return (cells.permute(0, 2, 3, 1)[..., None, :] - _PALETTE).square().sum(-1).argmin(-1)


def cell_accuracies(images: Tensor, sources: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the shares of correct cells, [image] each: among the cells that should change, and among those that
    should not.

    images, sources, expected: [image, 3, SIZE, SIZE], 0 to 1; a cell is correct if it has the color of `expected`.
    """
    cells, source_cells, expected_cells = read_cells(images), read_cells(sources), read_cells(expected)
    correct = (cells == expected_cells).float().flatten(1)
    changes = (source_cells != expected_cells).float().flatten(1)
    stays = 1 - changes
    changed_share = (correct * changes).sum(1) / changes.sum(1).clamp(min=1)
    return changed_share, (correct * stays).sum(1) / stays.sum(1).clamp(min=1)


class EditChecked:
    """Reward: 1 if all cells of the image have the colors of the expected image, else 0.

    With `part` it is a share of correct cells: "changed" among the cells that should change, "kept" among those that
    should not.
    None for an image that holds NaN or inf. Raises UserError for images of another size, and for prompts without
    metadata["expected"].
    """

    scope: Literal["sample"] = "sample"

    def __init__(self, *, part: Part | None = None) -> None:
        if part not in (None, "changed", "kept"):
            raise ValueError(f"part must be changed or kept, not {part!r}")
        self.part = part

    def score(self, samples: Sequence[Sample]) -> list[float | None]:
        return score_finite(samples, self._score)

    def _score(self, samples: list[Sample]) -> list[float]:
        """Returns the rewards of samples whose images are finite: 1 or 0, or with `part` a share of correct cells."""
        images = stack_images(samples, (3, SIZE, SIZE))
        changed, unchanged = cell_accuracies(images, _metadata(samples, "source"), _metadata(samples, "expected"))
        if self.part is not None:
            return (changed if self.part == "changed" else unchanged).tolist()
        return ((changed == 1) & (unchanged == 1)).float().tolist()


def unintended_changes(samples: Sequence[Sample]) -> Tensor:
    """Guard against hacked rewards: returns the share of changed pixels among those that should not change,
    [sample]."""
    images = stack_images(samples).float().clamp(0, 1)
    source, expected = _metadata(samples, "source"), _metadata(samples, "expected")
    stays = ((source - expected).abs().amax(1) == 0).flatten(1).float()
    changed = ((images - source).abs().amax(1) >= CHANGE_THRESHOLD).flatten(1).float()
    return (changed * stays).sum(1) / stays.sum(1).clamp(min=1)


def region_distance(samples: Sequence[Sample]) -> Tensor:
    """Returns the mean squared error to the source over the pixels that should not change, [sample]. This is CoCoEdit's
    region-preserving term, with a known region."""
    images = stack_images(samples).float().clamp(0, 1)
    source, expected = _metadata(samples, "source"), _metadata(samples, "expected")
    stays = ((source - expected).abs().amax(1, keepdim=True) == 0).float()
    # `stays` has one channel, images have three
    return ((images - source).square() * stays).flatten(1).sum(1) / (3 * stays.flatten(1).sum(1)).clamp(min=1)


class RegionKept:
    """Reward: minus `region_distance`, so that unchanged pixels outside of the edited region score highest (0)."""

    scope: Literal["sample"] = "sample"

    def score(self, samples: Sequence[Sample]) -> list[float | None]:
        return score_finite(samples, lambda finite: (-region_distance(finite)).tolist())


def _metadata(samples: Sequence[Sample], name: str) -> Tensor:
    """Stacks a tensor of the prompts' metadata, [sample, ...]. Raises UserError if a prompt lacks it."""
    missing = next((s.prompt.id for s in samples if name not in s.prompt.metadata), None)
    if missing is not None:
        raise UserError(
            f"prompt {missing!r} has no metadata[{name!r}]; rewards of edits need task.data.type=edits, or a source of "
            "prompts with this key"
        )
    return torch.stack([sample.prompt.metadata[name] for sample in samples])

"""Sentences that ask for a moving shape, such as "the square moves up slowly", and videos to learn from.

A video is drawn on a grid whose cells are CELL x CELL pixels: a VAE that halves the sides loses nothing of it. What was
drawn is known exactly, and `tracking` reads it back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from mmrl.rollouts import Prompt

CELL = 2  # pixels a side
OBJECT = 3  # cells a side of an object
SHAPES = {
    "square": ("###", "###", "###"),
    "cross": (".#.", "###", ".#."),
    "ring": ("###", "#.#", "###"),
    "corner": ("#..", "#..", "###"),
}
DIRECTIONS = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}  # of rows and columns
SPEEDS = ("slowly", "quickly")
SPLITS = ("train", "heldout", "all")
Split = Literal["train", "heldout", "all"]


@dataclass(frozen=True)
class Canvas:
    """The grid on which shapes move: its cells a side, and how many cells from its start an object is in each frame."""

    grid: int
    slowly: tuple[int, ...]
    quickly: tuple[int, ...]

    @property
    def frames(self) -> int:
        return len(self.slowly)

    @property
    def size(self) -> int:
        """Pixels a side of a frame."""
        return self.grid * CELL

    @property
    def room(self) -> int:
        """The number of positions of an object along a side."""
        return self.grid - OBJECT + 1

    def steps(self, speed: str) -> tuple[int, ...]:
        return {"slowly": self.slowly, "quickly": self.quickly}[speed]


# of generated videos, 5 x 12 x 12 pixels, and of videos in questions, 5 x 16 x 16
GENERATION_CANVAS = Canvas(6, slowly=(0, 0, 1, 1, 2), quickly=(0, 1, 2, 3, 3))
QUESTION_CANVAS = Canvas(8, slowly=(0, 0, 1, 1, 2), quickly=(0, 1, 2, 3, 4))


@dataclass(frozen=True)
class Motion:
    """The motion that a sentence asks for."""

    shape: str
    direction: str
    speed: str

    def __str__(self) -> str:
        return f"the {self.shape} moves {self.direction} {self.speed}"


def words() -> list[str]:
    """Returns every word of the sentences, sorted."""
    return sorted({"the", "moves", *SHAPES, *DIRECTIONS, *SPEEDS})


@cache
def motions(split: Split) -> tuple[Motion, ...]:
    """Returns all motions of a split, whatever the seed. A motion is held out where the indices of its parts sum to 3
    modulo 4, so that each part is trained on in others."""
    parts = [list(part) for part in (SHAPES, DIRECTIONS, SPEEDS)]
    selected = []
    for indices in product(*(range(len(part)) for part in parts)):
        heldout = sum(indices) % 4 == 3
        if split == "all" or heldout == (split == "heldout"):
            selected.append(Motion(*(part[i] for part, i in zip(parts, indices, strict=True))))
    return tuple(selected)


@cache
def template(shape: str) -> Tensor:
    """Returns the cells of a shape, [1, OBJECT, OBJECT] float32, white on black."""
    return torch.tensor([[[float(mark == "#") for mark in row] for row in SHAPES[shape]]])


def draw(canvas: Canvas, motion: Motion, top: int, left: int) -> Tensor:
    """Draws the video of an object that starts at the cell `top`, `left`: [frame, 1, size, size] float32, 0 to 1."""
    down, right = DIRECTIONS[motion.direction]
    steps = canvas.steps(motion.speed)
    return torch.stack([still(canvas, motion.shape, top + down * step, left + right * step) for step in steps])


def still(canvas: Canvas, shape: str, top: int, left: int) -> Tensor:
    """Draws one frame of an object at the cell `top`, `left`: [1, size, size] float32, 0 to 1."""
    cells = torch.zeros(1, canvas.grid, canvas.grid)
    cells[:, top : top + OBJECT, left : left + OBJECT] = template(shape)
    return cells.repeat_interleave(CELL, 1).repeat_interleave(CELL, 2)


def starts(canvas: Canvas, motion: Motion) -> tuple[range, range]:
    """Returns the rows and columns at which a motion may start so that its object stays in the image."""
    travel, room = canvas.steps(motion.speed)[-1], canvas.room
    return tuple(  # type: ignore[return-value]
        range(travel, room) if way < 0 else range(room - travel) if way > 0 else range(room)
        for way in DIRECTIONS[motion.direction]
    )


def spoiled(motion: Motion, rng: np.random.Generator) -> Motion:
    """Returns the motion with one part changed by chance."""
    parts: dict[str, Sequence[str]] = {
        "shape": list(SHAPES),
        "direction": list(DIRECTIONS),
        "speed": SPEEDS,
    }
    name = str(rng.choice(list(parts)))
    others = [value for value in parts[name] if value != vars(motion)[name]]
    change: dict[str, Any] = {name: others[rng.integers(len(others))]}
    return replace(motion, **change)


class MovingShapes:
    """`size` prompts; item i depends on (split, seed, i) and `careless` alone. Metadata: `motion`, `kind` (its
    direction) and `target`, a video on GENERATION_CANVAS for supervised training, which for the share `careless` has
    one part wrong.
    """

    def __init__(self, split: Split, *, size: int, seed: int, careless: float = 0.0) -> None:
        self.split, self.size, self.seed, self.careless = split, size, seed, careless

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < self.size:
            raise IndexError(f"item {index} of {self.size}")
        rng = np.random.default_rng([SPLITS.index(self.split), self.seed, index])
        pool = motions(self.split)
        motion = pool[rng.integers(len(pool))]
        shown = spoiled(motion, rng) if rng.random() < self.careless else motion
        top, left = (int(rng.choice(list(cells))) for cells in starts(GENERATION_CANVAS, shown))
        metadata = {"motion": motion, "kind": motion.direction, "target": draw(GENERATION_CANVAS, shown, top, left)}
        return Prompt(id=f"moving-{self.split}-{self.seed}-{index}", text=str(motion), metadata=metadata)

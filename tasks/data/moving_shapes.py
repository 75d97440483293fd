"""Sentences that ask for a moving shape, such as "the square moves up slowly", and videos to learn from.

Videos are drawn on a grid whose cells are CELL x CELL pixels, so a VAE that halves the sides can reproduce them
exactly. `mmrl.tasks.video_generation.tracking` recovers shape, direction and speed from such a video.
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
DIRECTIONS = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}  # (row, column) per step
SPEEDS = ("slowly", "quickly")
SPLITS = ("train", "heldout", "all")
Split = Literal["train", "heldout", "all"]


@dataclass(frozen=True)
class Canvas:
    """The grid on which shapes move.

    grid: cells along each side. slowly, quickly: for each frame, how many cells the object has moved from its start.
    """

    grid: int
    slowly: tuple[int, ...]
    quickly: tuple[int, ...]

    @property
    def num_frames(self) -> int:
        return len(self.slowly)

    @property
    def size(self) -> int:
        """Pixels along each side of a frame."""
        return self.grid * CELL

    @property
    def num_positions(self) -> int:
        """The number of positions that an object can have along a side."""
        return self.grid - OBJECT + 1

    def distances(self, speed: str) -> tuple[int, ...]:
        """Returns how many cells an object of this speed has moved, for each frame."""
        return {"slowly": self.slowly, "quickly": self.quickly}[speed]


# Generated videos have 5 frames of 12 x 12 pixels, videos of questions 5 frames of 16 x 16.
GENERATION_CANVAS = Canvas(6, slowly=(0, 0, 1, 1, 2), quickly=(0, 1, 2, 3, 3))
QUESTION_CANVAS = Canvas(8, slowly=(0, 0, 1, 1, 2), quickly=(0, 1, 2, 3, 4))


@dataclass(frozen=True)
class Motion:
    """The motion that a sentence asks for: a key of SHAPES, a key of DIRECTIONS, and one of SPEEDS."""

    shape: str
    direction: str
    speed: str

    def __str__(self) -> str:
        return f"the {self.shape} moves {self.direction} {self.speed}"


def vocabulary() -> list[str]:
    """Returns all words of the sentences, sorted."""
    return sorted({"the", "moves", *SHAPES, *DIRECTIONS, *SPEEDS})


@cache
def motions(split: Split) -> tuple[Motion, ...]:
    """Returns all motions of a split, which depends on no seed.

    A motion is held out if the indices of its shape, direction and speed sum to 3 modulo 4. So the training motions
    contain each shape, direction and speed.
    """
    parts = [list(part) for part in (SHAPES, DIRECTIONS, SPEEDS)]
    selected = []
    for indices in product(*(range(len(part)) for part in parts)):
        heldout = sum(indices) % 4 == 3
        if split == "all" or heldout == (split == "heldout"):
            selected.append(Motion(*(part[i] for part, i in zip(parts, indices, strict=True))))
    return tuple(selected)


@cache
def shape_cells(shape: str) -> Tensor:
    """Returns the cells of a shape, [1, OBJECT, OBJECT] float32: 1 inside, 0 outside."""
    return torch.tensor([[[float(character == "#") for character in row] for row in SHAPES[shape]]])


def draw_video(canvas: Canvas, motion: Motion, top: int, left: int) -> Tensor:
    """Draws the video of an object that starts at the cell `top`, `left`: [frame, 1, size, size] float32, 0 to 1."""
    down, right = DIRECTIONS[motion.direction]
    distances = canvas.distances(motion.speed)
    frames = [draw_frame(canvas, motion.shape, top + down * moved, left + right * moved) for moved in distances]
    return torch.stack(frames)


def draw_frame(canvas: Canvas, shape: str, top: int, left: int) -> Tensor:
    """Draws one frame with an object at the cell `top`, `left`: [1, size, size] float32, 0 to 1."""
    cells = torch.zeros(1, canvas.grid, canvas.grid)
    cells[:, top : top + OBJECT, left : left + OBJECT] = shape_cells(shape)
    return cells.repeat_interleave(CELL, 1).repeat_interleave(CELL, 2)


def start_positions(canvas: Canvas, motion: Motion) -> tuple[range, range]:
    """Returns the rows and the columns at which a motion may start so that its object stays in the image."""
    distance, positions = canvas.distances(motion.speed)[-1], canvas.num_positions

    def along(step: int) -> range:
        """Returns the starts along one axis. step: 1 or -1 if the object moves along it, else 0."""
        if step < 0:
            return range(distance, positions)
        return range(positions - distance) if step > 0 else range(positions)

    row_step, column_step = DIRECTIONS[motion.direction]
    return along(row_step), along(column_step)


def with_wrong_part(motion: Motion, rng: np.random.Generator) -> Motion:
    """Returns the motion with another shape, direction or speed, selected at random."""
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
    """`size` prompts that ask for a moving shape; item i depends on (split, seed, i) and `wrong_share` only.

    Metadata: `motion`, `kind` (its direction) and `target`, a video on GENERATION_CANVAS for supervised training. In
    the share `wrong_share` of the prompts the target has another shape, direction or speed than the prompt.
    """

    def __init__(self, split: Split, *, size: int, seed: int, wrong_share: float = 0.0) -> None:
        self.split, self.size, self.seed, self.wrong_share = split, size, seed, wrong_share

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Prompt:
        """Returns prompt `index`, which is random but determined by the split, the seed and `index`. With the
        probability `wrong_share` its target video shows another motion than its text. Its metadata: see the class."""
        if not 0 <= index < self.size:
            raise IndexError(f"index {index} is out of range: there are {self.size} prompts")
        rng = np.random.default_rng([SPLITS.index(self.split), self.seed, index])
        pool = motions(self.split)
        motion = pool[rng.integers(len(pool))]
        drawn_motion = with_wrong_part(motion, rng) if rng.random() < self.wrong_share else motion
        rows, columns = start_positions(GENERATION_CANVAS, drawn_motion)
        top, left = int(rng.choice(list(rows))), int(rng.choice(list(columns)))
        target = draw_video(GENERATION_CANVAS, drawn_motion, top, left)
        metadata = {"motion": motion, "kind": motion.direction, "target": target}
        return Prompt(id=f"moving-{self.split}-{self.seed}-{index}", text=str(motion), metadata=metadata)

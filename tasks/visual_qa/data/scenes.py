"""Scenes of many handwritten digits, with questions about digits on a colored square.

The digits are too small to read at the image's size, and easy to read in a crop: the policy has to call the tool zoom.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from PIL import Image

from mmrl.rollouts import Prompt
from mmrl.tasks.visual_qa.data.digits import CELL, SPLITS, digit_images, split_indices

COLORS = {"red": (160, 0, 0), "green": (0, 130, 0), "blue": (0, 0, 190), "yellow": (120, 110, 0)}


class ScenesSource:
    """`size` questions about scenes of `rows` x `columns` digits; item i depends on (split, seed, i) and the layout
    only.

    Each digit is in a square of `cell` pixels. For each of `colours` one square has that color, and the question asks
    for the digit on one of them. Training and held-out scenes use disjoint images of digits.

    Metadata: `kind` (the color), `target` (the box of the requested digit: left, top, right, bottom as fractions of
    width and height), and `demonstration`, the target responses of supervised training. These are a call of zoom, in
    coordinates from 0 to `columns` along both sides, and the digit in its box. In the share `wrong_share` the box is a
    random cell. The share `direct` is the answer without a zoom. The answer of the prompt is always right.

    Raises ValueError for an unknown split or color, or an impossible layout.
    """

    def __init__(
        self,
        split: Literal["train", "heldout"] = "train",
        *,
        size: int,
        seed: int,
        rows: int = 1,
        columns: int = 4,
        cell: int = 8,
        jitter: int = 0,
        colours: tuple[str, ...] = ("red", "blue"),
        wrong_share: float = 0.0,
        direct: float = 0.0,
    ):
        if split not in SPLITS:
            raise ValueError(f"split must be one of {', '.join(SPLITS)}, not {split!r}")
        if unknown := [color for color in colours if color not in COLORS]:
            raise ValueError(f"colours must be some of {', '.join(COLORS)}, not {', '.join(unknown)}")
        margin, self.num_digits = (cell - CELL) // 2, rows * columns
        if size < 1 or seed < 0:
            raise ValueError(f"size must be at least 1 and seed at least 0, not {size} and {seed}")
        if not 1 <= len(colours) <= self.num_digits:
            raise ValueError(
                f"{len(colours)} colours do not fit on {self.num_digits} digits (rows x columns); name one for each "
                "digit at most, and at least one"
            )
        if not 0 <= jitter <= margin:
            raise ValueError(
                f"jitter must be 0 to {max(0, margin)} with cell={cell}, not {jitter}; lower jitter or raise cell"
            )
        self.split, self.size, self.seed = split, size, seed
        self.rows, self.columns, self.cell, self.jitter, self.colours = rows, columns, cell, jitter, tuple(colours)
        self.wrong_share, self.direct = wrong_share, direct
        self._pool = split_indices(split)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Prompt:
        """Returns question `index` about a random scene of digits. Everything is determined by the split, the seed and
        `index`.

        The demonstration zooms in on the cell in question, or with the probability `wrong_share` on a random one, and
        then answers with the digit there; with the probability `direct` it is the right answer only.
        """
        if not 0 <= index < self.size:
            raise IndexError(f"index {index} is out of range: there are {self.size} prompts")
        rng = np.random.default_rng([SPLITS.index(self.split), self.seed, index])
        images, labels = digit_images()
        indices = rng.choice(self._pool, self.num_digits, replace=False)
        colored_cells = rng.choice(self.num_digits, len(self.colours), replace=False)
        number = index % len(self.colours)
        target, color = int(colored_cells[number]), self.colours[number]
        offsets = rng.integers(-self.jitter, self.jitter + 1, (self.num_digits, 2))
        image = self._draw(images[indices], dict(zip(colored_cells.tolist(), self.colours, strict=True)), offsets)
        # Sampled last, so that demonstrations change no question.
        zoomed_cell = int(rng.integers(self.num_digits)) if rng.random() < self.wrong_share else target
        box = ",".join(f"{fraction * self.columns:g}" for fraction in self._box(zoomed_cell))
        zoom_responses = [f"zoom({box})", str(labels[indices[zoomed_cell]])]
        direct = rng.random() < self.direct
        answer = str(labels[indices[target]])
        return Prompt(
            id=f"scenes-{self.split}-{self.seed}-{index}",
            text=f"Which digit is on {color}?",
            images=(image,),
            answer=answer,
            metadata={
                "kind": color,
                "target": self._box(target),
                "digits": labels[indices].tolist(),
                "demonstration": [answer] if direct else zoom_responses,
            },
        )

    def _box(self, cell: int) -> list[float]:
        """Returns left, top, right and bottom of a cell, as fractions of width and height."""
        row, column = divmod(cell, self.columns)
        return [column / self.columns, row / self.rows, (column + 1) / self.columns, (row + 1) / self.rows]

    def _draw(self, images: np.ndarray, backgrounds: dict[int, str], offsets: np.ndarray) -> Image.Image:
        """Draws a scene. images: [cell, 8, 8] uint8; backgrounds: the color of a cell's square, black if it has none;
        offsets: [cell, 2], how many pixels each digit moves down and right."""
        canvas = np.zeros((self.rows * self.cell, self.columns * self.cell, 3), np.uint8)
        margin = (self.cell - CELL) // 2
        for number, (image, (down, right)) in enumerate(zip(images, offsets, strict=True)):
            row, column = (self.cell * index for index in divmod(number, self.columns))
            if number in backgrounds:
                canvas[row : row + self.cell, column : column + self.cell] = COLORS[backgrounds[number]]
            top, left = row + margin + down, column + margin + right
            part = canvas[top : top + CELL, left : left + CELL]
            np.maximum(part, image[:, :, None], out=part)
        return Image.fromarray(canvas)

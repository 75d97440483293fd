"""Scenes of many handwritten digits, with questions about coloured ones: too small to read at the size at which the
image is shown, and easy to read in a crop of the right region."""

from __future__ import annotations

from typing import Literal

import numpy as np
from PIL import Image

from mmrl.rollouts import Prompt
from mmrl.tasks.visual_qa.data.digits import CELL, SPLITS, handwritten, split_indices

COLOURS = {"red": (160, 0, 0), "green": (0, 130, 0), "blue": (0, 0, 190), "yellow": (120, 110, 0)}


class ScenesSource:
    """`size` questions about scenes of `rows` x `columns` digits, each in a square of `cell` pixels; item i depends on
    (split, seed, i) and the layout, on nothing else. One digit stands on each of the `colours`, and the question asks
    for one of them.

    Train and held-out scenes are made of disjoint images. Metadata: `kind` (the colour), `target` (the box of the digit
    in question, as fractions of width and height) and `demonstration`: a list of responses that zooms to a cell
    and then names its digit, in coordinates that run from 0 to `columns` along both sides. In the share `wandering` of
    them the cell is any, so that the digit may be another; the share `direct` answers without a zoom. The answer
    itself is always right.

    Raises ValueError for an unknown split or colour, or a layout that is not possible.
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
        wandering: float = 0.0,
        direct: float = 0.0,
    ):
        if split not in SPLITS:
            raise ValueError(f"split must be one of {', '.join(SPLITS)}, not {split!r}")
        if unknown := [colour for colour in colours if colour not in COLOURS]:
            raise ValueError(f"colours must be some of {', '.join(COLOURS)}, not {', '.join(unknown)}")
        room, self.count = (cell - CELL) // 2, rows * columns
        if size < 1 or seed < 0 or not 1 <= len(colours) <= self.count or not 0 <= jitter <= room:
            raise ValueError(
                f"size >= 1, seed >= 0, at most {self.count} colours and 0 <= jitter <= {max(0, room)} are needed, "
                f"not {size=}, {seed=}, {colours=}, {jitter=}, {cell=}"
            )
        self.split, self.size, self.seed = split, size, seed
        self.rows, self.columns, self.cell, self.jitter, self.colours = rows, columns, cell, jitter, tuple(colours)
        self.wandering, self.direct = wandering, direct
        self._pool = split_indices(split)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < self.size:
            raise IndexError(f"item {index} of {self.size}")
        rng = np.random.default_rng([SPLITS.index(self.split), self.seed, index])
        images, labels = handwritten()
        chosen = rng.choice(self._pool, self.count, replace=False)
        marked = rng.choice(self.count, len(self.colours), replace=False)
        number = index % len(self.colours)
        target, colour = int(marked[number]), self.colours[number]
        offsets = rng.integers(-self.jitter, self.jitter + 1, (self.count, 2))
        image = self._drawn(images[chosen], dict(zip(marked.tolist(), self.colours, strict=True)), offsets)
        # Drawn last, so that demonstrations change no question.
        shown = int(rng.integers(self.count)) if rng.random() < self.wandering else target
        box = ",".join(f"{share * self.columns:g}" for share in self._box(shown))
        zoomed = [f"zoom({box})", str(labels[chosen[shown]])]
        direct = rng.random() < self.direct
        answer = str(labels[chosen[target]])
        return Prompt(
            id=f"scenes-{self.split}-{self.seed}-{index}",
            text=f"Which digit is on {colour}?",
            images=(image,),
            answer=answer,
            metadata={
                "kind": colour,
                "target": self._box(target),
                "digits": labels[chosen].tolist(),
                "demonstration": [answer] if direct else zoomed,
            },
        )

    def _box(self, index: int) -> list[float]:
        row, column = divmod(index, self.columns)
        return [column / self.columns, row / self.rows, (column + 1) / self.columns, (row + 1) / self.rows]

    def _drawn(self, images: np.ndarray, marks: dict[int, str], offsets: np.ndarray) -> Image.Image:
        """images: [cell, 8, 8] uint8; marks: the colour that a cell stands on; offsets: [cell, 2], down and right."""
        canvas = np.zeros((self.rows * self.cell, self.columns * self.cell, 3), np.uint8)
        middle = (self.cell - CELL) // 2
        for number, (image, (down, right)) in enumerate(zip(images, offsets, strict=True)):
            row, column = (self.cell * index for index in divmod(number, self.columns))
            if number in marks:
                canvas[row : row + self.cell, column : column + self.cell] = COLOURS[marks[number]]
            top, left = row + middle + down, column + middle + right
            part = canvas[top : top + CELL, left : left + CELL]
            np.maximum(part, image[:, :, None], out=part)
        return Image.fromarray(canvas)

"""Questions about still lifes: photograph-like images of a table with objects, each with a digit on a card.

The cards are too small to read at the size in which the policy sees an image, and easy to read in a crop: the policy
has to call the tool zoom.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from io import BytesIO
from typing import TYPE_CHECKING, Literal

import numpy as np
from PIL import Image

from mmrl.rollouts import Prompt
from mmrl.runtime.installation import extra_command
from mmrl.tasks.visual_qa.data.digits import SPLITS
from mmrl.tasks.visual_qa.data.kinds import STILL_LIFE_COLOURS
from mmrl.tasks.visual_qa.data.kinds import STILL_LIFE_GRID as GRID

if TYPE_CHECKING:
    from mmrl.tasks.visual_qa.data.still_life_scene import Photographer

QUALITY = 92  # of the JPEG files in which images are kept, as cameras write them


@dataclass(frozen=True)
class RenderedStillLife:
    """An image as a JPEG file, and for each of its objects the column and row of the cell with its card, its color and
    the digit on its card. All digits of an image differ."""

    file: bytes
    cells: list[tuple[int, int]]
    colours: list[str]
    digits: list[int]


class StillLifesSource:
    """`size` questions about still lifes of `objects` objects of different colors. One has a color of `requested`.

    `repeats` successive questions are the same, with demonstrations of their own. The image of question i depends on
    (split, seed, i // repeats, objects, requested) only.

    Metadata: `kind` (the requested color), `target` (the cell of a grid of GRID x GRID with the requested card: left,
    top, right, bottom as fractions of width and height), `digits` (of all cards), and `demonstration`, the target
    responses of supervised training: a call of zoom with that cell, in coordinates from 0 to GRID, and the digit in it.
    In the share `wrong_share` it is the cell of a random object. The share `direct` is the answer without a zoom. The
    answer of the prompt is always right.

    Raises ValueError for an unknown split or color, a number of objects for which there are not enough colors, or
    without the package mujoco.
    """

    def __init__(
        self,
        split: Literal["train", "heldout"] = "train",
        *,
        size: int,
        seed: int,
        objects: int = 4,
        requested: Sequence[str] = STILL_LIFE_COLOURS,
        repeats: int = 1,
        wrong_share: float = 0.0,
        direct: float = 0.0,
    ):
        if split not in SPLITS:
            raise ValueError(f"split must be one of {', '.join(SPLITS)}, not {split!r}")
        if size < 1 or seed < 0 or repeats < 1:
            raise ValueError(
                f"size and repeats must be at least 1 and seed at least 0, not {size}, {repeats} and {seed}"
            )
        if not 1 <= objects <= len(STILL_LIFE_COLOURS):
            raise ValueError(f"objects must be 1 to {len(STILL_LIFE_COLOURS)}, the number of colors, not {objects}")
        if not requested or set(requested) - set(STILL_LIFE_COLOURS):
            raise ValueError(
                f"requested must be some of {', '.join(STILL_LIFE_COLOURS)}, not {', '.join(requested) or 'none'}"
            )
        if find_spec("mujoco") is None:
            raise ValueError(f"still lifes need mujoco, which renders them: {extra_command('mujoco')}")
        self.split, self.size, self.seed, self.objects = split, size, seed, objects
        self.requested, self.repeats, self.wrong_share, self.direct = tuple(requested), repeats, wrong_share, direct
        self._thread = ThreadPoolExecutor(1)  # an OpenGL context belongs to one thread
        self._photographer: Photographer | None = None
        self._taken: dict[int, RenderedStillLife] = {}

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Prompt:
        """Returns question `index`. The first question about an image renders it, which takes about 50 ms."""
        if not 0 <= index < self.size:
            raise IndexError(f"index {index} is out of range: there are {self.size} prompts")
        number, repeat = divmod(index, self.repeats)
        if number not in self._taken:
            self._taken[number] = self._thread.submit(self._take, number).result()
        still_life = self._taken[number]
        rng = np.random.default_rng([SPLITS.index(self.split), self.seed, number, repeat])
        shown = int(rng.integers(self.objects)) if rng.random() < self.wrong_share else 0
        left, top = still_life.cells[shown]
        zoom = f"zoom({left},{top},{left + 1},{top + 1})"
        answer = str(still_life.digits[0])
        left, top = still_life.cells[0]
        return Prompt(
            id=f"still_lifes-{self.split}-{self.seed}-{index}",
            text=f"Which digit belongs to the {still_life.colours[0]} object?",
            images=(Image.open(BytesIO(still_life.file)).convert("RGB"),),
            answer=answer,
            metadata={
                "kind": still_life.colours[0],
                "target": [left / GRID, top / GRID, (left + 1) / GRID, (top + 1) / GRID],
                "digits": still_life.digits,
                "demonstration": [answer] if rng.random() < self.direct else [zoom, str(still_life.digits[shown])],
            },
        )

    def _take(self, number: int) -> RenderedStillLife:
        """Renders image `number`, whose first object is the one that is asked about."""
        from mmrl.tasks.visual_qa.data.still_life_scene import Photographer

        if self._photographer is None:
            self._photographer = Photographer(self.objects)
        rng = np.random.default_rng([SPLITS.index(self.split), self.seed, number])
        requested = self.requested[number % len(self.requested)]
        others = [str(colour) for colour in rng.permutation(STILL_LIFE_COLOURS) if colour != requested]
        colours = [requested, *others[: self.objects - 1]]
        digits = rng.permutation(10)[: self.objects].tolist()
        still_life = self._photographer.render(colours, digits, rng)
        buffer = BytesIO()
        still_life.image.save(buffer, "JPEG", quality=QUALITY)
        return RenderedStillLife(
            buffer.getvalue(), np.floor(still_life.cards * GRID).astype(int).tolist(), colours, digits
        )

"""Rows of real handwritten digits that are added step by step, one sum a line: reasoning whose every step can be
checked."""

from __future__ import annotations

from itertools import accumulate
from typing import Literal

import numpy as np

from mmrl.rollouts import Prompt
from mmrl.tasks.visual_qa.data.digits import SPLITS, canvas, digit_images, split_indices

QUESTION = "Add the digits from left to right, one sum a line."


class RunningSumsSource:
    """`size` rows of digits to be added from left to right; item i depends on (split, seed, i) and `cells` only.

    The answer is the sum of the first digit, of the first two digits and so on, each on a line. Metadata: `digits`
    (left to right), `images` (indices into `load_digits`), and `demonstration`, the target response of supervised
    training. That is the answer, but with the probability `wrong_share` a random line is one too large, and all later
    ones with it.

    split: "train" or "heldout", which use disjoint images and independent random numbers. Raises ValueError for an
    unknown split.
    """

    def __init__(
        self, split: Literal["train", "heldout"], *, size: int, seed: int, cells: int, wrong_share: float = 0.0
    ) -> None:
        if split not in SPLITS:
            raise ValueError(f"split must be one of {', '.join(SPLITS)}, not {split!r}")
        self.split, self.size, self.seed, self.cells, self.wrong_share = split, size, seed, cells, wrong_share
        self._pool = split_indices(split)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Prompt:
        """Returns question `index`."""
        if not 0 <= index < self.size:
            raise IndexError(f"index {index} is out of range: there are {self.size} prompts")
        rng = np.random.default_rng([SPLITS.index(self.split), self.seed, index])
        images, labels = digit_images()
        indices = rng.choice(self._pool, self.cells, replace=False)
        digits = [int(label) for label in labels[indices]]
        sums = list(accumulate(digits))
        # Sampled last, so that wrong_share changes no question.
        wrong_from = int(rng.integers(self.cells)) if rng.random() < self.wrong_share else self.cells
        lines = [total + (line >= wrong_from) for line, total in enumerate(sums)]
        return Prompt(
            id=f"sums-{self.split}-{self.seed}-{index}",
            text=QUESTION,
            images=(canvas(images[indices], np.zeros((self.cells, 2), int)),),
            answer="\n".join(map(str, sums)),
            metadata={
                "digits": digits,
                "images": indices.tolist(),
                "demonstration": "\n".join(map(str, lines)),
            },
        )

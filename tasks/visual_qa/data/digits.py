"""Questions about rows of real handwritten digits: a visual task that needs no download and no judge.

The images are the 1797 8x8 images of `mmrl.tasks.data.handwritten_digits` (the test part of the UCI set "Optical
Recognition of Handwritten Digits", Alpaydin and Kaynak, 1998).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from PIL import Image

from mmrl.rollouts import Prompt
from mmrl.tasks.data.handwritten_digits import load_digits

CELL = 8  # pixels along each side of an image of the data set; also the patch size of the tiny model
POSITIONS = {
    1: ("middle",),
    2: ("left", "right"),
    3: ("left", "middle", "right"),
    4: ("first", "second", "third", "fourth"),
    5: ("first", "second", "third", "fourth", "fifth"),
}
SPLITS = ("train", "heldout")


@dataclass(frozen=True)
class DigitQuestion:
    """A question about a row of digits, its answer, and the position of the digit it is about (None: the whole row)."""

    text: str
    answer: str
    position: str | None = None


def _which(digits: tuple[int, ...], rng: np.random.Generator) -> DigitQuestion:
    """Asks which digit is at a random position."""
    index = rng.integers(len(digits))
    position = POSITIONS[len(digits)][index]
    return DigitQuestion(f"Which digit is {_at(position)}?", str(digits[index]), position)


def _sum(digits: tuple[int, ...], rng: np.random.Generator) -> DigitQuestion:
    return DigitQuestion("What is the sum of the digits?", str(sum(digits)))


def _largest(digits: tuple[int, ...], rng: np.random.Generator) -> DigitQuestion:
    return DigitQuestion("Which digit is the largest?", str(max(digits)))


def _above_five(digits: tuple[int, ...], rng: np.random.Generator) -> DigitQuestion:
    return DigitQuestion("How many digits are above five?", str(sum(digit > 5 for digit in digits)))


def _where(digits: tuple[int, ...], rng: np.random.Generator) -> DigitQuestion | None:
    """Asks where a digit is that occurs only once. Returns None if there is no such digit."""
    unique = [index for index, digit in enumerate(digits) if digits.count(digit) == 1]
    if not unique:
        return None
    index = rng.choice(unique)
    position = POSITIONS[len(digits)][index]
    return DigitQuestion(f"Where is the {digits[index]}?", position, position)


def _at(position: str) -> str:
    if position == "middle":
        return "in the middle"
    return f"on the {position}" if position in ("left", "right") else position


# A function gets the digits from left to right, and returns None if the question would have no single answer.
QUESTIONS: dict[str, Callable[[tuple[int, ...], np.random.Generator], DigitQuestion | None]] = {
    "which": _which,
    "sum": _sum,
    "largest": _largest,
    "above_five": _above_five,
    "where": _where,
}
KINDS = tuple(QUESTIONS)


@lru_cache(maxsize=1)
def digit_images() -> tuple[np.ndarray, np.ndarray]:
    """Returns all images [image, 8, 8] in uint8 (0 black to 255 white) and their labels [image]."""
    images, labels = load_digits()
    return np.rint(images * (255 / 16)).astype(np.uint8), labels


def split_indices(split: Literal["train", "heldout"]) -> np.ndarray:
    """Returns the indices of the images of a split. Every fourth image of each digit is held out; the split depends on
    no seed."""
    _, labels = digit_images()
    rank_in_digit = np.empty(len(labels), dtype=int)
    for digit in range(10):
        members = np.flatnonzero(labels == digit)
        rank_in_digit[members] = np.arange(len(members))
    return np.flatnonzero((rank_in_digit % 4 == 3) == (split == "heldout"))


def canvas(images: np.ndarray, offsets: np.ndarray, scale: int = 1) -> Image.Image:
    """Draws digits side by side as an RGB image. Its height is 8 scale pixels, its width 8 scale x the number of
    digits.

    images: [cell, 8, 8] uint8; offsets: [cell, 2], how many pixels each digit moves down and right inside its cell;
    parts outside of the cell are cut off.
    """
    margin = int(np.abs(offsets).max())
    padded = np.pad(images, ((0, 0), (margin, margin), (margin, margin)))
    cells = [
        image[margin - down : margin - down + CELL, margin - right : margin - right + CELL]
        for image, (down, right) in zip(padded, offsets, strict=True)
    ]
    row = np.kron(np.concatenate(cells, axis=1), np.ones((scale, scale), dtype=np.uint8))
    return Image.fromarray(row).convert("RGB")


class DigitsSource:
    """`size` questions about rows of digits; item i depends on (split, seed, i) and the layout only.

    Training and held-out rows use disjoint images and independent random numbers, even if their seeds are equal. Item i
    is of kind `kinds[i % len(kinds)]`, so the kinds are balanced. Rows without an unambiguous answer are replaced.

    Metadata: `kind`, `digits` (left to right), `images` (indices into `load_digits`), `place`, and `demonstration`, the
    target response of supervised training. That is the answer, or for the share `wrong_share` of the questions with a
    numeric answer, the answer plus one. The answer of the prompt is always right.

    Raises ValueError for an unknown split or kind, or an impossible layout.
    """

    def __init__(
        self,
        split: Literal["train", "heldout"] = "train",
        *,
        size: int,
        seed: int,
        kinds: tuple[str, ...] = KINDS,
        cells: int = 3,
        scale: int = 1,
        jitter: int = 0,
        wrong_share: float = 0.0,
    ):
        if split not in SPLITS:
            raise ValueError(f"split must be one of {', '.join(SPLITS)}, not {split!r}")
        unknown = [kind for kind in kinds if kind not in QUESTIONS]
        if unknown or not kinds:
            raise ValueError(f"kinds must be some of {', '.join(KINDS)}, not {', '.join(unknown) or 'none'}")
        if cells not in POSITIONS:
            raise ValueError(f"cells must be {min(POSITIONS)} to {max(POSITIONS)}, not {cells}")
        for key, value, least, most in (
            ("size", size, 1, None),
            ("seed", seed, 0, None),
            ("scale", scale, 1, None),
            ("jitter", jitter, 0, CELL - 1),
        ):
            if value < least or (most is not None and value > most):
                range_text = f"at least {least}" if most is None else f"{least} to {most}"
                raise ValueError(f"{key} must be {range_text}, not {value}")
        self.split, self.size, self.seed, self.kinds = split, size, seed, tuple(kinds)
        self.cells, self.scale, self.jitter, self.wrong_share = cells, scale, jitter, wrong_share
        self._pool = split_indices(split)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Prompt:
        """Returns question `index` about a random row of digits. Everything is determined by the split, the seed and
        `index`. With the probability `wrong_share` the demonstration of an answer in digits is one too large."""
        if not 0 <= index < self.size:
            raise IndexError(f"index {index} is out of range: there are {self.size} prompts")
        rng = np.random.default_rng([SPLITS.index(self.split), self.seed, index])
        kind = self.kinds[index % len(self.kinds)]
        images, labels = digit_images()
        question = None
        while question is None:
            indices = rng.choice(self._pool, self.cells, replace=False)
            digits = tuple(int(label) for label in labels[indices])
            question = QUESTIONS[kind](digits, rng)
        offsets = rng.integers(-self.jitter, self.jitter + 1, (self.cells, 2))
        # Sampled last, so that wrong_share changes no question.
        is_wrong = question.answer.isdigit() and rng.random() < self.wrong_share
        demonstration = str(int(question.answer) + 1) if is_wrong else question.answer
        return Prompt(
            id=f"digits-{self.split}-{self.seed}-{index}",
            text=question.text,
            images=(canvas(images[indices], offsets, self.scale),),
            answer=question.answer,
            metadata={
                "kind": kind,
                "digits": list(digits),
                "images": indices.tolist(),
                "place": question.position,
                "demonstration": demonstration,
            },
        )

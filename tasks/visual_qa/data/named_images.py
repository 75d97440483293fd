"""Questions about rows of named images: what something is, where it is, what stands beside it, and how often.

The images are of `named_images/`: 218 things in the styles of three icon sets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from PIL import Image

from mmrl.rollouts import Prompt
from mmrl.tasks.data.named_images.images import SHIPPED, SIDE, Style, check_style, images, names

SPLITS = ("train", "heldout")
POSITIONS = {2: ("left", "right"), 3: ("left", "middle", "right")}
Names = Literal["all", "shown", "heldout"]
NAMES: tuple[Names, ...] = ("all", "shown", "heldout")


@dataclass(frozen=True)
class NamedImageQuestion:
    """A question, its answer and `other`: the answer of a careless reader, who is one position off."""

    text: str
    answer: str
    other: str


def _alone(row: Sequence[str], rng: np.random.Generator) -> NamedImageQuestion:
    return NamedImageQuestion("What is it?", row[0], _another(row[0], rng))


def _alike(row: Sequence[str], rng: np.random.Generator) -> NamedImageQuestion:
    """Asks about a row that shows one thing everywhere: names are learned before positions are."""
    return NamedImageQuestion(_at(POSITIONS[len(row)][int(rng.integers(len(row)))]), row[0], _another(row[0], rng))


def _another(name: str, rng: np.random.Generator) -> str:
    others = [other for other in names() if other != name]
    return others[rng.integers(len(others))]


def _what(row: Sequence[str], rng: np.random.Generator) -> NamedImageQuestion:
    index = int(rng.integers(len(row)))
    return NamedImageQuestion(_at(POSITIONS[len(row)][index]), row[index], _after(row, index))


def _at(position: str) -> str:
    return f"What is {'in' if position == 'middle' else 'on'} the {position}?"


def _left_of(row: Sequence[str], rng: np.random.Generator) -> NamedImageQuestion:
    return _neighbour(row, rng, -1)


def _right_of(row: Sequence[str], rng: np.random.Generator) -> NamedImageQuestion:
    return _neighbour(row, rng, 1)


def _neighbour(row: Sequence[str], rng: np.random.Generator, step: int) -> NamedImageQuestion:
    """Asks for a neighbour; step: -1 for the left neighbour, 1 for the right one."""
    first = int(rng.integers(len(row) - 1))
    named, target = (first + 1, first) if step == -1 else (first, first + 1)
    side = "left" if step == -1 else "right"
    return NamedImageQuestion(f"What is {side} of the {row[named]}?", row[target], _after(row, target))


def _where(row: Sequence[str], rng: np.random.Generator) -> NamedImageQuestion:
    index, positions = int(rng.integers(len(row))), POSITIONS[len(row)]
    return NamedImageQuestion(f"Where is the {row[index]}?", positions[index], _after(positions, index))


def _after(row: Sequence[str], index: int) -> str:
    """Returns the entry one position further right; after the last one comes the first."""
    return row[(index + 1) % len(row)]


def _how_many(row: Sequence[str], rng: np.random.Generator) -> NamedImageQuestion:
    name = row[int(rng.integers(len(row)))]
    count = row.count(name)
    return NamedImageQuestion(f"How many show a {name}?", str(count), str(count + 1))


def _all(row: Sequence[str], rng: np.random.Generator) -> NamedImageQuestion:
    return NamedImageQuestion("What are they?", " ".join(row), " ".join(row[::-1]))


QUESTIONS: dict[str, Callable[[Sequence[str], np.random.Generator], NamedImageQuestion]] = {
    "alone": _alone,
    "alike": _alike,
    "what": _what,
    "left_of": _left_of,
    "right_of": _right_of,
    "where": _where,
    "how_many": _how_many,
    "all": _all,
}
KINDS = tuple(QUESTIONS)


def name_indices(which: Names) -> np.ndarray:
    """Returns indices into `names`: every fifth name is held out, whatever the seed."""
    every = np.arange(len(names()))
    if which == "all":
        return every
    return every[(every % 5 == 4) == (which == "heldout")]


def canvas(cells: np.ndarray, offsets: np.ndarray, background: np.ndarray) -> Image.Image:
    """Draws a row of images on one colour, RGB of 32 x 32 cells pixels (height x width).

    cells: [cell, 32, 32, RGBA] uint8; offsets: [cell, 2], how far down and right each moves inside its cell, where what
    leaves is cut off; background: [RGB] uint8.
    """
    margin = int(np.abs(offsets).max())
    padded = np.pad(cells, ((0, 0), (margin, margin), (margin, margin), (0, 0)))
    moved = [
        image[margin - down : margin - down + SIDE, margin - right : margin - right + SIDE]
        for image, (down, right) in zip(padded, offsets, strict=True)
    ]
    row = np.concatenate(moved, axis=1).astype(np.float32)
    opacity = row[..., 3:] / 255
    return Image.fromarray(np.rint(row[..., :3] * opacity + background * (1 - opacity)).astype(np.uint8))


class NamedImagesSource:
    """`size` questions about rows of named images; item i depends on (split, seed, i) and the layout alone.

    Each image has one of `styles` by chance. A row shows different things, but for `how_many`, where one may stand
    several times, in whatever style, `alike`, where one thing stands everywhere, and `alone`, which shows one. Item i
    is of kind `kinds[i % len(kinds)]`. Train and held-out rows come from disjoint random streams; `which` says of which
    names they are made. Metadata: `kind`, `names` and `styles` (left to right), and `demonstration`: the response
    that a supervised run learns, which is the answer or, in the share `careless`, that of the next position (of a
    number: one more). The answer itself is always right.

    Raises ValueError for an unknown split, kind, style or part of the names, or a layout that is not possible.
    """

    def __init__(
        self,
        split: Literal["train", "heldout"] = "train",
        *,
        size: int,
        seed: int,
        which: Names = "all",
        styles: tuple[Style, ...] = SHIPPED,
        kinds: tuple[str, ...] = KINDS,
        cells: int = 3,
        jitter: int = 0,
        tint: int = 0,
        careless: float = 0.0,
    ):
        if split not in SPLITS:
            raise ValueError(f"split must be one of {', '.join(SPLITS)}, not {split!r}")
        if which not in NAMES:
            raise ValueError(f"names must be one of {', '.join(NAMES)}, not {which!r}")
        unknown = [kind for kind in kinds if kind not in QUESTIONS]
        if unknown or not kinds:
            raise ValueError(f"kinds must be some of {', '.join(KINDS)}, not {', '.join(unknown) or 'none'}")
        if not styles:
            raise ValueError("styles must name at least one style")
        for style in styles:
            check_style(style)
        if size < 1 or seed < 0 or cells not in (2, 3) or not 0 <= jitter < SIDE or not 0 <= tint <= 255:
            raise ValueError(
                f"size >= 1, seed >= 0, cells 2 or 3, 0 <= jitter < {SIDE} and 0 <= tint <= 255 are needed, "
                f"not {size=}, {seed=}, {cells=}, {jitter=}, {tint=}"
            )
        self.split, self.size, self.seed, self.kinds, self.styles = split, size, seed, tuple(kinds), tuple(styles)
        self.which, self.cells, self.jitter, self.tint, self.careless = which, cells, jitter, tint, careless
        self._pool = name_indices(which)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < self.size:
            raise IndexError(f"item {index} of {self.size}")
        rng = np.random.default_rng([SPLITS.index(self.split), self.seed, index])
        kind = self.kinds[index % len(self.kinds)]
        cells = 1 if kind == "alone" else self.cells
        shown = rng.choice(self._pool, cells, replace=False)
        if kind == "how_many":
            shown = rng.permutation(shown[np.minimum(np.arange(cells), rng.integers(cells))])
        if kind == "alike":
            shown = shown[:1].repeat(cells)
        row = [names()[name] for name in shown]
        question = QUESTIONS[kind](row, rng)
        styles: list[Style] = [self.styles[number] for number in rng.integers(len(self.styles), size=cells)]
        drawn = np.stack([images(style)[name] for style, name in zip(styles, shown, strict=True)])
        offsets = rng.integers(-self.jitter, self.jitter + 1, (cells, 2))
        background = 255 - rng.integers(0, self.tint + 1, 3)
        # Drawn last, so that the share of careless demonstrations changes no question.
        careless = rng.random() < self.careless
        return Prompt(
            id=f"named-{self.split}-{self.seed}-{index}",
            text=question.text,
            images=(canvas(drawn, offsets, background),),
            answer=question.answer,
            metadata={
                "kind": kind,
                "names": row,
                "styles": styles,
                "demonstration": question.other if careless else question.answer,
            },
        )

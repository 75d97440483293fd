"""Questions about images in a row: what something is, where it is, what is beside it, and how often it occurs.

The images are those of `mmrl.tasks.data.named_images`: 218 things, each with a name and in the styles of three icon
sets.
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
Names = Literal["all", "shown", "heldout"]  # "shown": those to train on
NAMES: tuple[Names, ...] = ("all", "shown", "heldout")


@dataclass(frozen=True)
class NamedImageQuestion:
    """A question about a row of images. wrong_answer: a plausible mistake, such as the name one position further."""

    text: str
    answer: str
    wrong_answer: str


def _alone(row: Sequence[str], rng: np.random.Generator) -> NamedImageQuestion:
    return NamedImageQuestion("What is it?", row[0], _another(row[0], rng))


def _alike(row: Sequence[str], rng: np.random.Generator) -> NamedImageQuestion:
    """Asks about a row of equal things, so that names can be learned before positions."""
    return NamedImageQuestion(_at(POSITIONS[len(row)][int(rng.integers(len(row)))]), row[0], _another(row[0], rng))


def _another(name: str, rng: np.random.Generator) -> str:
    """Returns a random other name."""
    others = [other for other in names() if other != name]
    return others[rng.integers(len(others))]


def _what(row: Sequence[str], rng: np.random.Generator) -> NamedImageQuestion:
    index = int(rng.integers(len(row)))
    return NamedImageQuestion(_at(POSITIONS[len(row)][index]), row[index], _next(row, index))


def _at(position: str) -> str:
    return f"What is {'in' if position == 'middle' else 'on'} the {position}?"


def _left_of(row: Sequence[str], rng: np.random.Generator) -> NamedImageQuestion:
    return _neighbour(row, rng, -1)


def _right_of(row: Sequence[str], rng: np.random.Generator) -> NamedImageQuestion:
    return _neighbour(row, rng, 1)


def _neighbour(row: Sequence[str], rng: np.random.Generator, step: int) -> NamedImageQuestion:
    """Asks what is beside a random image. step: -1 for its left neighbour, 1 for its right one. The
    wrong answer is another name of the row."""
    first = int(rng.integers(len(row) - 1))
    named, target = (first + 1, first) if step == -1 else (first, first + 1)
    side = "left" if step == -1 else "right"
    return NamedImageQuestion(f"What is {side} of the {row[named]}?", row[target], _next(row, target))


def _where(row: Sequence[str], rng: np.random.Generator) -> NamedImageQuestion:
    index, positions = int(rng.integers(len(row))), POSITIONS[len(row)]
    return NamedImageQuestion(f"Where is the {row[index]}?", positions[index], _next(positions, index))


def _next(row: Sequence[str], index: int) -> str:
    """Returns the entry that follows `index`; the first one follows the last."""
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


def name_indices(split: Names) -> np.ndarray:
    """Returns the indices into `names` of a split. Every fifth name is held out; the split depends on no seed."""
    indices = np.arange(len(names()))
    if split == "all":
        return indices
    return indices[(indices % 5 == 4) == (split == "heldout")]


def canvas(cells: np.ndarray, offsets: np.ndarray, background: np.ndarray) -> Image.Image:
    """Draws images side by side on a background: an RGB image of 32 pixels height, and 32 pixels width for each cell.

    cells: [cell, 32, 32, RGBA] uint8; offsets: [cell, 2], how many pixels each image moves down and right inside its
    cell; parts outside of the cell are cut off; background: color, [RGB] uint8.
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
    """`size` questions about rows of named images; item i depends on (split, seed, i) and the layout only.

    A row has `cells` different things, each in a random one of `styles`. Exceptions: for kind `how_many` things may
    repeat, for `alike` all are the same, and `alone` has a row of one. Item i is of kind `kinds[i % len(kinds)]`.
    Training and held-out rows use independent random numbers. names_split: which names rows are made of. jitter: up to
    how many pixels images are moved. tint: how far the background may be from white in each channel, 0 to 255.

    Metadata: `kind`, `names` and `styles` (left to right), and `demonstration`, the target response of supervised
    training. That is the answer, or in the share `wrong_share` the question's wrong answer. The answer of the prompt is
    always right.

    Raises ValueError for an unknown split, kind, style or split of the names, or an impossible layout.
    """

    def __init__(
        self,
        split: Literal["train", "heldout"] = "train",
        *,
        size: int,
        seed: int,
        names_split: Names = "all",
        styles: tuple[Style, ...] = SHIPPED,
        kinds: tuple[str, ...] = KINDS,
        cells: int = 3,
        jitter: int = 0,
        tint: int = 0,
        wrong_share: float = 0.0,
    ):
        if split not in SPLITS:
            raise ValueError(f"split must be one of {', '.join(SPLITS)}, not {split!r}")
        if names_split not in NAMES:
            raise ValueError(f"names must be one of {', '.join(NAMES)}, not {names_split!r}")
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
        self.cells, self.jitter, self.tint, self.wrong_share = cells, jitter, tint, wrong_share
        self._pool = name_indices(names_split)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Prompt:
        """Returns question `index` about a random row of images. Everything is determined by the split, the seed and
        `index`. With the probability `wrong_share` the demonstration is a wrong answer."""
        if not 0 <= index < self.size:
            raise IndexError(f"index {index} is out of range: there are {self.size} prompts")
        rng = np.random.default_rng([SPLITS.index(self.split), self.seed, index])
        kind = self.kinds[index % len(self.kinds)]
        cells = 1 if kind == "alone" else self.cells
        indices = rng.choice(self._pool, cells, replace=False)
        if kind == "how_many":  # the last of the first k + 1 names fills the rest of the row
            indices = rng.permutation(indices[np.minimum(np.arange(cells), rng.integers(cells))])
        if kind == "alike":
            indices = indices[:1].repeat(cells)
        row = [names()[name] for name in indices]
        question = QUESTIONS[kind](row, rng)
        styles: list[Style] = [self.styles[number] for number in rng.integers(len(self.styles), size=cells)]
        cell_images = np.stack([images(style)[name] for style, name in zip(styles, indices, strict=True)])
        offsets = rng.integers(-self.jitter, self.jitter + 1, (cells, 2))
        background = 255 - rng.integers(0, self.tint + 1, 3)
        # Sampled last, so that wrong_share changes no question.
        is_wrong = rng.random() < self.wrong_share
        return Prompt(
            id=f"named-{self.split}-{self.seed}-{index}",
            text=question.text,
            images=(canvas(cell_images, offsets, background),),
            answer=question.answer,
            metadata={
                "kind": kind,
                "names": row,
                "styles": styles,
                "demonstration": question.wrong_answer if is_wrong else question.answer,
            },
        )

"""Questions about drawn videos: which way a shape moves, how fast, and which of two shapes comes first."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from PIL import Image

from mmrl.rollouts import Prompt, Video
from mmrl.tasks.data import moving_shapes
from mmrl.tasks.visual_qa.data.digits import SPLITS
from mmrl.tasks.visual_qa.data.kinds import VIDEO_QUESTIONS

CHANGE = moving_shapes.QUESTION_CANVAS.frames // 2  # the frame from which on the second shape is shown
FPS = 2.0


class VideosSource:
    """`size` questions about videos on QUESTION_CANVAS; item i depends on (split, seed, i) and the options alone.

    In held-out videos shapes stand or start at other positions than in those of training, and other pairs of them
    follow one another; every motion is in both. Item i is of kind `kinds[i % len(kinds)]`. Metadata: `kind`, and
    `demonstration`: the answer or, for the share `careless`, another answer to the same kind of question. shuffled:
    frames are shown in an order drawn by chance, so that the answer can not be seen: a control.
    """

    def __init__(
        self,
        split: Literal["train", "heldout"],
        *,
        size: int,
        seed: int,
        kinds: tuple[str, ...] = VIDEO_QUESTIONS,
        careless: float = 0.0,
        shuffled: bool = False,
    ) -> None:
        self.split, self.size, self.seed, self.kinds = split, size, seed, kinds
        self.careless, self.shuffled = careless, shuffled
        self.motions = moving_shapes.motions("all")
        self.pairs = [
            (first, second)
            for i, first in enumerate(moving_shapes.SHAPES)
            for j, second in enumerate(moving_shapes.SHAPES)
            if i != j and (i // 2 == j // 2) == (split == "heldout")  # in both orders: a pair gives no answer away
        ]

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < self.size:
            raise IndexError(f"item {index} of {self.size}")
        random = np.random.default_rng([SPLITS.index(self.split), self.seed, index])
        kind = self.kinds[index % len(self.kinds)]
        question, answer, others, frames = (
            self._order(random) if kind == "order" else self._motion(random, speed=kind == "speed")
        )
        # Drawn after the video, so that neither option changes a question.
        shown = str(random.choice(others)) if random.random() < self.careless else answer
        if self.shuffled:
            frames = [frames[i] for i in random.permutation(len(frames))]
        return Prompt(
            id=f"clips-{self.split}-{self.seed}-{index}",
            text=question,
            videos=(Video(tuple(frames), FPS),),
            answer=answer,
            metadata={"kind": kind, "demonstration": shown},
        )

    def _motion(self, random: np.random.Generator, *, speed: bool) -> tuple[str, str, list[str], list[Image.Image]]:
        """Returns question, answer, other answers and frames."""
        motion = self.motions[random.integers(len(self.motions))]
        top, left = self._start(random, *moving_shapes.starts(moving_shapes.QUESTION_CANVAS, motion))
        frames = [as_image(frame) for frame in moving_shapes.draw(moving_shapes.QUESTION_CANVAS, motion, top, left)]
        answer, answers = (
            (motion.speed, moving_shapes.SPEEDS) if speed else (motion.direction, moving_shapes.DIRECTIONS)
        )
        question = f"How does the {motion.shape} move?" if speed else f"Where does the {motion.shape} move?"
        return question, answer, [word for word in answers if word != answer], frames

    def _order(self, random: np.random.Generator) -> tuple[str, str, list[str], list[Image.Image]]:
        first, second = self.pairs[random.integers(len(self.pairs))]
        room = range(moving_shapes.QUESTION_CANVAS.room)
        top, left = self._start(random, room, room)
        still = [moving_shapes.still(moving_shapes.QUESTION_CANVAS, shape, top, left) for shape in (first, second)]
        frames = [as_image(still[number >= CHANGE]) for number in range(moving_shapes.QUESTION_CANVAS.frames)]
        return "Which shape comes first?", first, [second], frames

    def _start(self, random: np.random.Generator, rows: range, columns: range) -> tuple[int, int]:
        """Returns a row and a column of the split's start positions."""
        heldout = self.split == "heldout"
        starts = [(row, column) for row in rows for column in columns if ((row + column) % 4 == 3) == heldout]
        return starts[random.integers(len(starts))]


def as_image(frame: torch.Tensor) -> Image.Image:
    """[1, height, width], 0 to 1, as an RGB image."""
    return Image.fromarray((frame[0] * 255).round().byte().numpy()).convert("RGB")

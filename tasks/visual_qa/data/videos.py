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

CHANGE = moving_shapes.QUESTION_CANVAS.num_frames // 2  # index of the first frame with the second shape
FPS = 2.0  # frames per second that the policy is told


class VideosSource:
    """`size` questions about videos on QUESTION_CANVAS; item i depends on (split, seed, i) and the options only.

    Training and held-out videos have the same motions, but different start positions and different pairs of shapes.
    Item i is of kind `kinds[i % len(kinds)]`. shuffled: frames are in a random order, so that the answer cannot be
    seen; this is for control runs.

    Metadata: `kind`, and `demonstration`, the target response of supervised training. That is the answer, or in the
    share `wrong_share` another answer to the same kind of question.
    """

    def __init__(
        self,
        split: Literal["train", "heldout"],
        *,
        size: int,
        seed: int,
        kinds: tuple[str, ...] = VIDEO_QUESTIONS,
        wrong_share: float = 0.0,
        shuffled: bool = False,
    ) -> None:
        self.split, self.size, self.seed, self.kinds = split, size, seed, kinds
        self.wrong_share, self.shuffled = wrong_share, shuffled
        self.motions = moving_shapes.motions("all")
        self.pairs = [
            (first, second)
            for i, first in enumerate(moving_shapes.SHAPES)
            for j, second in enumerate(moving_shapes.SHAPES)
            # Pairs of shapes 0 and 1, and of shapes 2 and 3, are held out. Each pair occurs in both orders, so that the
            # answer does not follow from the pair.
            if i != j and (i // 2 == j // 2) == (split == "heldout")
        ]

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Prompt:
        """Returns question `index` about a random video. Everything is determined by the split, the seed and
        `index`."""
        if not 0 <= index < self.size:
            raise IndexError(f"index {index} is out of range: there are {self.size} prompts")
        rng = np.random.default_rng([SPLITS.index(self.split), self.seed, index])
        kind = self.kinds[index % len(self.kinds)]
        question, answer, others, frames = (
            self._order(rng) if kind == "order" else self._motion(rng, speed=kind == "speed")
        )
        # Sampled after the video, so that neither option changes a question.
        demonstration = str(rng.choice(others)) if rng.random() < self.wrong_share else answer
        if self.shuffled:
            frames = [frames[i] for i in rng.permutation(len(frames))]
        return Prompt(
            id=f"clips-{self.split}-{self.seed}-{index}",
            text=question,
            videos=(Video(tuple(frames), FPS),),
            answer=answer,
            metadata={"kind": kind, "demonstration": demonstration},
        )

    def _motion(self, rng: np.random.Generator, *, speed: bool) -> tuple[str, str, list[str], list[Image.Image]]:
        """Asks for the speed of a shape, or else for its direction. Returns question, answer, wrong answers and
        frames."""
        motion = self.motions[rng.integers(len(self.motions))]
        top, left = self._start(rng, *moving_shapes.start_positions(moving_shapes.QUESTION_CANVAS, motion))
        frames = [
            as_image(frame) for frame in moving_shapes.draw_video(moving_shapes.QUESTION_CANVAS, motion, top, left)
        ]
        answer, answers = (
            (motion.speed, moving_shapes.SPEEDS) if speed else (motion.direction, moving_shapes.DIRECTIONS)
        )
        question = f"How does the {motion.shape} move?" if speed else f"Where does the {motion.shape} move?"
        return question, answer, [word for word in answers if word != answer], frames

    def _order(self, rng: np.random.Generator) -> tuple[str, str, list[str], list[Image.Image]]:
        """Asks which of two shapes comes first. Returns question, answer, wrong answers and frames."""
        first, second = self.pairs[rng.integers(len(self.pairs))]
        positions = range(moving_shapes.QUESTION_CANVAS.num_positions)
        top, left = self._start(rng, positions, positions)
        drawn_shapes = [
            moving_shapes.draw_frame(moving_shapes.QUESTION_CANVAS, shape, top, left) for shape in (first, second)
        ]
        frames = [
            as_image(drawn_shapes[number >= CHANGE]) for number in range(moving_shapes.QUESTION_CANVAS.num_frames)
        ]
        return "Which shape comes first?", first, [second], frames

    def _start(self, rng: np.random.Generator, rows: range, columns: range) -> tuple[int, int]:
        """Returns a random row and column of the split's start positions."""
        heldout = self.split == "heldout"
        starts = [(row, column) for row in rows for column in columns if ((row + column) % 4 == 3) == heldout]
        return starts[rng.integers(len(starts))]


def as_image(frame: torch.Tensor) -> Image.Image:
    """Converts a frame [1, height, width], 0 to 1, to an RGB image."""
    return Image.fromarray((frame[0] * 255).round().byte().numpy()).convert("RGB")

"""Exact tracking of moving shapes in videos: the object, and its position in each frame."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from mmrl.rollouts import Sample
from mmrl.tasks.data.moving_shapes import CELL, DIRECTIONS, GENERATION_CANVAS, SHAPES, Motion, still
from mmrl.tasks.video_generation.clips import stack_videos

CLEAN = (
    0.4  # squared distance of a frame from its object alone, over that of black, above which there is no object in it
)
POSITIONS = GENERATION_CANVAS.room  # of an object along a side
STILL, FAST = 0.25, 0.65  # cells a frame: below there is no motion, above it is quick


@dataclass(frozen=True)
class Track:
    """The object in one video, and its position in each frame."""

    shape: str
    rows: tuple[int, ...]  # cell of the object's top, by frame
    columns: tuple[int, ...]  # and of its left side
    distance: float  # the largest over frames of the squared distance from the object alone; black has 1

    @property
    def velocity(self) -> tuple[float, float]:
        """The least-squares slopes of rows and columns, in cells a frame."""
        return slope(self.rows), slope(self.columns)


def slope(positions: Sequence[int]) -> float:
    """Returns the slope of the least-squares line through positions at times 0, 1, 2, ..."""
    time = torch.arange(len(positions), dtype=torch.float64)
    time = time - time.mean()
    return float((time * torch.tensor(positions, dtype=torch.float64)).sum() / time.square().sum())


@cache
def _drawings() -> Tensor:
    """Draws every shape at every position, [shape, position, cell]."""
    positions = [divmod(position, POSITIONS) for position in range(POSITIONS**2)]
    drawn = torch.stack(
        [still(GENERATION_CANVAS, shape, *position)[0, ::CELL, ::CELL] for shape in SHAPES for position in positions]
    )
    return drawn.view(len(SHAPES), len(positions), -1)


def track(videos: Tensor) -> list[Track]:
    """Tracks the object of each video: the one whose best positions over the frames are nearest to the video.

    videos: [video, frame, 1, size, size] on GENERATION_CANVAS, 0 to 1, clamped.
    """
    grid = GENERATION_CANVAS.grid
    cells = videos.float().clamp(0, 1).unflatten(4, (grid, CELL)).unflatten(3, (grid, CELL)).mean((4, 6))
    drawings = _drawings()
    distance = torch.cdist(cells.flatten(2).flatten(0, 1), drawings.flatten(0, 1)).square()
    weight = drawings[:, 0].square().sum(1)  # of each object's cells
    distance = distance.view(len(videos), GENERATION_CANVAS.frames, len(drawings), -1)
    nearest, position = distance.min(-1)  # [video, frame, object]
    best = nearest.sum(1).argmin(1)
    tracks = []
    for video, shape in enumerate(best.tolist()):
        rows, columns = zip(*(divmod(int(p), POSITIONS) for p in position[video, :, shape]), strict=True)
        tracks.append(Track(list(SHAPES)[shape], rows, columns, float(nearest[video, :, shape].max() / weight[shape])))
    return tracks


def marks(motion: Motion, observed: Track) -> dict[str, float]:
    """Returns which parts of a motion are right, each 0 or 1.

    identity   the shape, of an object that is clean in every frame
    direction  the faster of the two slopes is not still and points the way, and the other is still
    speed      that slope is of the requested speed, whatever its direction
    steady     no position is more than a cell from the least-squares line, nor is a step against the motion
    """
    clean = observed.distance <= CLEAN
    velocity = observed.velocity
    axis = 0 if abs(velocity[0]) >= abs(velocity[1]) else 1
    along, across = velocity[axis], velocity[1 - axis]
    moves = clean and abs(along) >= STILL and abs(across) < STILL
    down_right = DIRECTIONS[motion.direction]
    expected = down_right[axis]
    fast = abs(along) >= FAST
    return {
        "identity": float(clean and observed.shape == motion.shape),
        "direction": float(moves and expected * along > 0),
        "speed": float(moves and fast == (motion.speed == "quickly")),
        "steady": float(clean and steady(observed)),
    }


def steady(observed: Track) -> bool:
    """Returns whether the object moves at one speed: constant velocity as far as whole cells allow."""
    for positions in (observed.rows, observed.columns):
        rate = slope(positions)
        middle = sum(positions) / len(positions)
        line = [middle + rate * (t - (len(positions) - 1) / 2) for t in range(len(positions))]
        steps = [b - a for a, b in zip(positions, positions[1:], strict=False)]
        if any(abs(p - q) > 0.75 for p, q in zip(positions, line, strict=True)) or min(steps) * max(steps) < 0:
            return False
    return True


class MotionChecked:
    """Reward: 1 where the video shows exactly the requested motion (prompt.metadata["motion"]), else 0.

    With `partial` it is the mean of the `marks` instead; `part` names one of them. None for a video that holds NaN or
    inf. Scoring raises UserError for videos of another size.
    """

    scope: Literal["sample"] = "sample"

    def __init__(self, *, partial: bool = False, part: str | None = None) -> None:
        parts = ("identity", "direction", "speed", "steady")
        if part is not None and part not in parts:
            raise ValueError(f"part must be one of {', '.join(parts)}, not {part!r}")
        self.partial, self.part = partial, part

    def score(self, samples: Sequence[Sample]) -> list[float | None]:
        videos = stack_videos(samples, (GENERATION_CANVAS.frames, 1, GENERATION_CANVAS.size, GENERATION_CANVAS.size))
        finite = videos.flatten(1).isfinite().all(1)
        tracks = track(videos.nan_to_num())
        scores: list[float | None] = []
        for sample, observed, good in zip(samples, tracks, finite.tolist(), strict=True):
            parts = marks(sample.prompt.metadata["motion"], observed)
            value = parts[self.part] if self.part else sum(parts.values()) / len(parts)
            scores.append((value if self.partial or self.part else float(value == 1)) if good else None)
        return scores

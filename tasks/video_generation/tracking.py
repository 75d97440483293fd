"""Exact tracking of moving shapes in videos: which shape moves, and its position in each frame."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from mmrl.rollouts import Sample
from mmrl.tasks.data.moving_shapes import CELL, DIRECTIONS, GENERATION_CANVAS, SHAPES, Motion, draw_frame
from mmrl.tasks.video_generation.clips import stack_videos

MAX_DISTANCE = 0.4  # above this relative distance (see `Track`) a frame shows no object
POSITIONS = GENERATION_CANVAS.num_positions  # positions of an object along a side
# Cells per frame: slower than MIN_SPEED is no motion, FAST_SPEED or more is "quickly"
MIN_SPEED, FAST_SPEED = 0.25, 0.65


@dataclass(frozen=True)
class Track:
    """The object in one video, and its position in each frame."""

    shape: str
    rows: tuple[int, ...]  # cell of the object's top edge in each frame
    columns: tuple[int, ...]  # cell of its left edge
    # Squared distance of a frame from a clean drawing of the object, divided by the squared distance of a black frame
    # from that drawing; the maximum over frames. It is 0 for a clean video, and 1 for a black one.
    distance: float

    @property
    def velocity(self) -> tuple[float, float]:
        """The least-squares slopes of rows and columns, in cells per frame."""
        return slope(self.rows), slope(self.columns)


def slope(positions: Sequence[int]) -> float:
    """Returns the slope of the least-squares line through positions at times 0, 1, 2, ..."""
    time = torch.arange(len(positions), dtype=torch.float64)
    time = time - time.mean()
    return float((time * torch.tensor(positions, dtype=torch.float64)).sum() / time.square().sum())


@cache
def _drawings() -> Tensor:
    """Draws all shapes at all positions, [shape, position, cell] float32, 0 or 1."""
    positions = [divmod(position, POSITIONS) for position in range(POSITIONS**2)]
    frames = [draw_frame(GENERATION_CANVAS, shape, *position) for shape in SHAPES for position in positions]
    cells = torch.stack([frame[0, ::CELL, ::CELL] for frame in frames])
    return cells.view(len(SHAPES), len(positions), -1)


def track(videos: Tensor) -> list[Track]:
    """Tracks the object of each video: the shape that, at its best position in each frame, is nearest to the video.
    A track's distance is the largest squared error of a frame, as a multiple of the squared error of a black frame.

    videos: [video, frame, 1, size, size] on GENERATION_CANVAS, clamped to 0..1.
    """
    grid = GENERATION_CANVAS.grid
    cells = videos.float().clamp(0, 1).unflatten(4, (grid, CELL)).unflatten(3, (grid, CELL)).mean((4, 6))
    drawings = _drawings()
    # squared distances between frames and drawings, [video * frame, shape * position]
    distance = torch.cdist(cells.flatten(2).flatten(0, 1), drawings.flatten(0, 1)).square()
    black_distance = drawings[:, 0].square().sum(1)  # [shape], squared distance of a black frame from the object
    # [video, frame, shape, position]
    distance = distance.view(len(videos), GENERATION_CANVAS.num_frames, len(drawings), -1)
    nearest, position = distance.min(-1)  # [video, frame, shape]
    best = nearest.sum(1).argmin(1)
    tracks = []
    for video, shape in enumerate(best.tolist()):
        rows, columns = zip(*(divmod(int(p), POSITIONS) for p in position[video, :, shape]), strict=True)
        relative_distance = float(nearest[video, :, shape].max() / black_distance[shape])
        tracks.append(Track(list(SHAPES)[shape], rows, columns, relative_distance))
    return tracks


def part_scores(motion: Motion, track: Track) -> dict[str, float]:
    """Returns which parts of a motion a tracked video shows, 1 or 0 each.

    identity   the shape is right, and visible in all frames
    direction  the object moves along one axis only, in the right direction
    speed      the object moves along one axis only, at the right speed, in either direction
    steady     the object is visible in all frames and its velocity is constant, see `is_steady`
    """
    visible = track.distance <= MAX_DISTANCE
    velocity = track.velocity
    axis = 0 if abs(velocity[0]) >= abs(velocity[1]) else 1
    along, across = velocity[axis], velocity[1 - axis]
    moves = visible and abs(along) >= MIN_SPEED and abs(across) < MIN_SPEED
    expected = DIRECTIONS[motion.direction][axis]
    fast = abs(along) >= FAST_SPEED
    return {
        "identity": float(visible and track.shape == motion.shape),
        "direction": float(moves and expected * along > 0),
        "speed": float(moves and fast == (motion.speed == "quickly")),
        "steady": float(visible and is_steady(track)),
    }


def is_steady(track: Track) -> bool:
    """Returns whether the velocity is constant as far as whole cells allow: no position is further than 0.75 cells from
    the least-squares line, and no step goes backwards."""
    for positions in (track.rows, track.columns):
        velocity = slope(positions)
        mean = sum(positions) / len(positions)
        line = [mean + velocity * (t - (len(positions) - 1) / 2) for t in range(len(positions))]
        steps = [next_position - position for position, next_position in zip(positions, positions[1:], strict=False)]
        far = any(abs(position - fitted) > 0.75 for position, fitted in zip(positions, line, strict=True))
        goes_back = min(steps) < 0 < max(steps)
        if far or goes_back:
            return False
    return True


class MotionChecked:
    """Reward: 1 if the video shows exactly the requested motion (prompt.metadata["motion"]), else 0.

    With `partial` it is the mean of `part_scores` instead; `part` selects one of them. None for a video that holds NaN
    or inf. Scoring raises UserError for videos of another size.
    """

    scope: Literal["sample"] = "sample"

    def __init__(self, *, partial: bool = False, part: str | None = None) -> None:
        parts = ("identity", "direction", "speed", "steady")
        if part is not None and part not in parts:
            raise ValueError(f"part must be one of {', '.join(parts)}, not {part!r}")
        self.partial, self.part = partial, part

    def score(self, samples: Sequence[Sample]) -> list[float | None]:
        """Returns the reward of each sample's video: 1 or 0, with `partial` the mean of `part_scores`, with `part` one
        of them; None for a video that holds NaN or inf."""
        videos = stack_videos(
            samples, (GENERATION_CANVAS.num_frames, 1, GENERATION_CANVAS.size, GENERATION_CANVAS.size)
        )
        finite = videos.flatten(1).isfinite().all(1)
        tracks = track(videos.nan_to_num())
        scores: list[float | None] = []
        for sample, sample_track, is_finite in zip(samples, tracks, finite.tolist(), strict=True):
            parts = part_scores(sample.prompt.metadata["motion"], sample_track)
            value = parts[self.part] if self.part else sum(parts.values()) / len(parts)
            if not is_finite:
                scores.append(None)
            else:
                scores.append(value if self.partial or self.part else float(value == 1))
        return scores

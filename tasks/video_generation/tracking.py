"""Reads moving shapes from clips, exactly: which object it is, and where it stands in each frame."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from mmrl.rollouts import Sample
from mmrl.tasks.data.moving_shapes import CELL, DIRECTIONS, DRAWN, SHAPES, Motion, still
from mmrl.tasks.video_generation.clips import stack_clips

CLEAN = (
    0.4  # squared distance of a frame from its object alone, over that of black, above which there is no object in it
)
PLACES = DRAWN.room  # of an object along a side
STILL, FAST = 0.25, 0.65  # cells a frame: below there is no motion, above it is quick


@dataclass(frozen=True)
class Track:
    """What was found in one clip."""

    shape: str
    rows: tuple[int, ...]  # cell of the object's top, by frame
    columns: tuple[int, ...]  # and of its left side
    distance: float  # the largest over frames of the squared distance from the object alone; black has 1

    @property
    def velocity(self) -> tuple[float, float]:
        """Least-squares slopes of rows and columns, in cells a frame."""
        return slope(self.rows), slope(self.columns)


def slope(places: Sequence[int]) -> float:
    """Of the least-squares line through places at times 0, 1, 2, ..."""
    time = torch.arange(len(places), dtype=torch.float64)
    time = time - time.mean()
    return float((time * torch.tensor(places, dtype=torch.float64)).sum() / time.square().sum())


@cache
def _drawings() -> Tensor:
    """Every shape at every place, [shape, place, cell]."""
    places = [divmod(place, PLACES) for place in range(PLACES**2)]
    drawn = torch.stack([still(DRAWN, shape, *place)[0, ::CELL, ::CELL] for shape in SHAPES for place in places])
    return drawn.view(len(SHAPES), len(places), -1)


def track(clips: Tensor) -> list[Track]:
    """Of [clip, frame, 1, size, size] on DRAWN, in 0..1, clamped: the object whose best places over the frames are
    nearest to the clip, and these places."""
    cells = clips.float().clamp(0, 1).unflatten(4, (DRAWN.grid, CELL)).unflatten(3, (DRAWN.grid, CELL)).mean((4, 6))
    drawings = _drawings()
    distance = torch.cdist(cells.flatten(2).flatten(0, 1), drawings.flatten(0, 1)).square()
    weight = drawings[:, 0].square().sum(1)  # of each object's cells
    nearest, place = distance.view(len(clips), DRAWN.frames, len(drawings), -1).min(-1)  # [clip, frame, object]
    best = nearest.sum(1).argmin(1)
    found = []
    for clip, which in enumerate(best.tolist()):
        rows, columns = zip(*(divmod(int(p), PLACES) for p in place[clip, :, which]), strict=True)
        found.append(Track(list(SHAPES)[which], rows, columns, float(nearest[clip, :, which].max() / weight[which])))
    return found


def marks(motion: Motion, found: Track) -> dict[str, float]:
    """What of a motion is right, each 0 or 1.

    identity   the shape, of an object that is clean in every frame
    direction  the faster of the two slopes is not still and points the way, and the other is still
    speed      that slope is of the speed asked for, whatever its direction
    steady     no place is more than a cell from the least-squares line, nor is a step against the motion
    """
    clean = found.distance <= CLEAN
    velocity = found.velocity
    axis = 0 if abs(velocity[0]) >= abs(velocity[1]) else 1
    along, across = velocity[axis], velocity[1 - axis]
    moves = clean and abs(along) >= STILL and abs(across) < STILL
    down_right = DIRECTIONS[motion.direction]
    expected = down_right[axis]
    fast = abs(along) >= FAST
    return {
        "identity": float(clean and found.shape == motion.shape),
        "direction": float(moves and expected * along > 0),
        "speed": float(moves and fast == (motion.speed == "quickly")),
        "steady": float(clean and steady(found)),
    }


def steady(found: Track) -> bool:
    """Whether the object moves at one speed: constant velocity as far as whole cells allow."""
    for places in (found.rows, found.columns):
        rate = slope(places)
        middle = sum(places) / len(places)
        line = [middle + rate * (t - (len(places) - 1) / 2) for t in range(len(places))]
        steps = [b - a for a, b in zip(places, places[1:], strict=False)]
        if any(abs(p - q) > 0.75 for p, q in zip(places, line, strict=True)) or min(steps) * max(steps) < 0:
            return False
    return True


class MotionChecked:
    """Reward: 1 where the clip shows exactly the motion asked for (prompt.metadata["motion"]), else 0.

    With `partial` it is the mean of the `marks` instead; `part` names one of them. None for a clip that holds NaN or
    inf. Scoring raises UserError for clips of another size.
    """

    scope: Literal["sample"] = "sample"

    def __init__(self, *, partial: bool = False, part: str | None = None) -> None:
        known = ("identity", "direction", "speed", "steady")
        if part is not None and part not in known:
            raise ValueError(f"part must be one of {', '.join(known)}, not {part!r}")
        self.partial, self.part = partial, part

    def score(self, samples: Sequence[Sample]) -> list[float | None]:
        clips = stack_clips(samples, (DRAWN.frames, 1, DRAWN.size, DRAWN.size))
        finite = clips.flatten(1).isfinite().all(1)
        tracks = track(clips.nan_to_num())
        scores: list[float | None] = []
        for sample, found, good in zip(samples, tracks, finite.tolist(), strict=True):
            given = marks(sample.prompt.metadata["motion"], found)
            value = given[self.part] if self.part else sum(given.values()) / len(given)
            scores.append((value if self.partial or self.part else float(value == 1)) if good else None)
        return scores

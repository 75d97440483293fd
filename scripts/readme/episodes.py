"""An animation of videos that `mmrl sample` wrote: a column for each start state, in the upper row the videos before
RL, in the lower row those after it.

.venv/bin/python scripts/readme/episodes.py scripts/readme/tabletop.gif AFTER.mp4 [...] --before BEFORE.mp4 [...]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import imageio.v3
from PIL import Image, ImageDraw

sys.path.insert(0, str(Path(__file__).parents[2]))
from scripts.readme.before_after import save_gif

LABEL, FRAME_MS, LAST_MS = 18, 120, 1500  # pixels of a row's label; milliseconds of a frame, and of the last one


def animate(target: Path, before: list[Path], after: list[Path]) -> None:
    """Writes the videos before and after RL, all at once; one that has ended keeps its last frame."""
    rows = [[imageio.v3.imread(video) for video in videos] for videos in (before, after)]
    height, width = rows[0][0].shape[1:3]
    frames = []
    for time in range(max(len(video) for row in rows for video in row)):
        frame = Image.new("RGB", (len(before) * width, 2 * (height + LABEL)), "white")
        for line, (label, row) in enumerate(zip(("before RL", "after RL"), rows, strict=True)):
            top = line * (height + LABEL)
            ImageDraw.Draw(frame).text((2, top + 2), label, fill="black")
            for place, video in enumerate(row):
                shown = Image.fromarray(video[min(time, len(video) - 1)])
                frame.paste(shown, (place * width, top + LABEL))
        frames.append(frame)
    save_gif(target, frames, FRAME_MS, LAST_MS)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("videos", type=Path, nargs="+", help="videos after RL")
    parser.add_argument("--before", type=Path, nargs="+", required=True, help="videos of the same starts before RL")
    options = parser.parse_args()
    if len(options.before) != len(options.videos):
        parser.error("--before needs as many videos as there are after RL")
    animate(options.target, options.before, options.videos)

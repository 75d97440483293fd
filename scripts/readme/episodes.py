"""The first, a middle and the last frame of some videos that `mmrl sample` wrote, side by side.

.venv/bin/python scripts/readme/episodes.py scripts/readme/tabletop.png VIDEO [VIDEO ...]

With --gif an animation instead: a column for each video, those of --before in the upper row, with as many videos of the
same start states.

.venv/bin/python scripts/readme/episodes.py scripts/readme/tabletop.gif VIDEO [...] --gif --before VIDEO [...]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import imageio.v3
import numpy as np
from PIL import Image, ImageDraw

sys.path.insert(0, str(Path(__file__).parents[2]))
from scripts.readme.before_after import save_gif

LABEL, FRAME_MS, LAST_MS = 16, 120, 1500  # pixels of a row's label; milliseconds of a frame, and of the last one


def main(target: Path, videos: list[Path]) -> None:
    rows = []
    for video in videos:
        frames = imageio.v3.imread(video)
        played = len(frames) - 10  # the last frame stands for half a second
        rows.append(np.concatenate([frames[0], frames[played // 2], frames[-1]], axis=1))
    sheet = Image.fromarray(np.concatenate(rows, axis=1))
    sheet.resize((sheet.width // 2, sheet.height // 2)).save(target, optimize=True)


def animate(target: Path, before: list[Path], after: list[Path]) -> None:
    """Writes the videos before and after RL, all at once; one that has ended keeps its last frame."""
    rows = [[imageio.v3.imread(video) for video in videos] for videos in (before, after)]
    height, width = (side // 2 for side in rows[0][0].shape[1:3])
    frames = []
    for time in range(max(len(video) for row in rows for video in row)):
        frame = Image.new("RGB", (len(before) * width, 2 * (height + LABEL)), "white")
        for line, (label, row) in enumerate(zip(("before RL", "after RL"), rows, strict=True)):
            top = line * (height + LABEL)
            ImageDraw.Draw(frame).text((2, top + 2), label, fill="black")
            for place, video in enumerate(row):
                shown = Image.fromarray(video[min(time, len(video) - 1)]).resize((width, height))
                frame.paste(shown, (place * width, top + LABEL))
        frames.append(frame)
    save_gif(target, frames, FRAME_MS, LAST_MS)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("videos", type=Path, nargs="+")
    parser.add_argument("--gif", action="store_true", help="an animation")
    parser.add_argument("--before", type=Path, nargs="+", default=[], help="videos before RL, for --gif")
    options = parser.parse_args()
    if options.gif and len(options.before) != len(options.videos):
        parser.error("--gif needs as many videos in --before as after RL")
    if options.gif:
        animate(options.target, options.before, options.videos)
    else:
        main(options.target, options.videos)

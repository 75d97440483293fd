"""The first rows of held-out images before training, and after it for each of some runs from the same base.

.venv/bin/python scripts/readme/before_after.py scripts/readme/image_digits.png RUN [RUN ...] [--rows 2]

With --gif an animation of one run instead: the same prompts from the same noise, at every evaluation, with the step.

.venv/bin/python scripts/readme/before_after.py scripts/readme/image_shapes.gif RUN --gif [--rows 4]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from PIL import Image, ImageDraw

BAR, FRAME_MS, LAST_MS = 22, 350, 2500  # pixels of the bar with the step; milliseconds of a frame, and of the last one
COLORS = 128


def main(target: Path, runs: list[Path], rows: int) -> None:
    grids = [sorted((run / "samples").glob("evaluation-*.png")) for run in runs]
    bands = [Image.open(path) for path in [grids[0][0], *(found[-1] for found in grids)]]
    width, height, gap = bands[0].width, rows * (bands[0].width // 10), 12
    sheet = Image.new("RGB", (width, len(bands) * (height + gap) - gap), "white")
    for place, band in enumerate(bands):
        sheet.paste(band.crop((0, 0, width, height)), (0, place * (height + gap)))
    sheet.save(target, optimize=True)


def animate(target: Path, run: Path, rows: int) -> None:
    """Writes the first rows of every evaluation of a run as an animated GIF."""
    sheets = sorted((run / "samples").glob("evaluation-*.png"))
    last = int(sheets[-1].stem.split("-")[1])
    frames = []
    for path in sheets:
        step, sheet = int(path.stem.split("-")[1]), Image.open(path).convert("RGB")
        height = rows * (sheet.width // 10)
        frame = Image.new("RGB", (sheet.width, height + BAR), "white")
        frame.paste(sheet.crop((0, 0, sheet.width, height)), (0, BAR))
        pen = ImageDraw.Draw(frame)
        pen.text((2, 4), f"step {step} of {last}", fill="black")
        pen.rectangle((110, 8, 110 + (sheet.width - 114) * step // max(last, 1), 14), fill=(57, 99, 209))
        frames.append(frame)
    save_gif(target, frames, FRAME_MS, LAST_MS)


def save_gif(target: Path, frames: list[Image.Image], frame_ms: int, last_ms: int) -> None:
    """Writes an endless animation with one palette, so that areas that do not change do not flicker."""
    tall = Image.new("RGB", (frames[0].width, frames[0].height * len(frames)))
    for place, frame in enumerate(frames):
        tall.paste(frame, (0, place * frame.height))
    # k-means after the median cut: without it small areas of a strong colour get the mean of a large dull one
    palette = tall.quantize(COLORS, kmeans=4)
    flat = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    durations = [frame_ms] * (len(flat) - 1) + [last_ms]
    flat[0].save(target, save_all=True, append_images=flat[1:], duration=durations, loop=0, optimize=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--gif", action="store_true", help="an animation of the evaluations of one run")
    options = vars(parser.parse_args())
    if options.pop("gif"):
        animate(options["target"], options["runs"][0], options["rows"])
    else:
        main(**options)

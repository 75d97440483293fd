"""The first rows of held-out images before training, and after it for each of some runs from the same base.

.venv/bin/python scripts/readme/before_after.py scripts/readme/image_digits.png RUN [RUN ...] [--rows 2]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from PIL import Image


def main(target: Path, runs: list[Path], rows: int) -> None:
    grids = [sorted((run / "samples").glob("evaluation-*.png")) for run in runs]
    bands = [Image.open(path) for path in [grids[0][0], *(found[-1] for found in grids)]]
    width, height, gap = bands[0].width, rows * (bands[0].width // 10), 12
    sheet = Image.new("RGB", (width, len(bands) * (height + gap) - gap), "white")
    for place, band in enumerate(bands):
        sheet.paste(band.crop((0, 0, width, height)), (0, place * (height + gap)))
    sheet.save(target, optimize=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--rows", type=int, default=2)
    main(**vars(parser.parse_args()))

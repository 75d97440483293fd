"""The first, a middle and the last frame of some videos that `mmrl sample` wrote, side by side.

.venv/bin/python scripts/readme/episodes.py scripts/readme/tabletop.png VIDEO [VIDEO ...]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import imageio.v3
import numpy as np
from PIL import Image


def main(target: Path, videos: list[Path]) -> None:
    rows = []
    for video in videos:
        frames = imageio.v3.imread(video)
        played = len(frames) - 10  # the last frame stands for half a second
        rows.append(np.concatenate([frames[0], frames[played // 2], frames[-1]], axis=1))
    sheet = Image.fromarray(np.concatenate(rows, axis=1))
    sheet.resize((sheet.width // 2, sheet.height // 2)).save(target, optimize=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("videos", type=Path, nargs="+")
    main(**vars(parser.parse_args()))

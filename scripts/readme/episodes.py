"""The first, a middle and the last frame of some videos that `mmrl sample` wrote, side by side.

.venv/bin/python scripts/readme/episodes.py scripts/readme/tabletop.png VIDEO [VIDEO ...]
"""

import argparse
from pathlib import Path

import imageio.v3
import numpy as np
from PIL import Image

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("target", type=Path)
parser.add_argument("videos", type=Path, nargs="+")
options = parser.parse_args()
rows = []
for video in options.videos:
    frames = imageio.v3.imread(video)
    played = len(frames) - 10  # the last frame stands for half a second
    rows.append(np.concatenate([frames[0], frames[played // 2], frames[-1]], axis=1))
sheet = Image.fromarray(np.concatenate(rows, axis=1))
sheet.resize((sheet.width // 2, sheet.height // 2)).save(options.target, optimize=True)

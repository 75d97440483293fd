"""The first rows of a run's held-out pictures before training and after it, one above the other.

.venv/bin/python scripts/readme/before_after.py runs/image_digits_flow scripts/readme/image_digits.png [--rows 2]
"""

import argparse
from pathlib import Path

from PIL import Image

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("run", type=Path)
parser.add_argument("target", type=Path)
parser.add_argument("--rows", type=int, default=2)
options = parser.parse_args()
grids = sorted((options.run / "samples").glob("evaluation-*.png"))
before, after = Image.open(grids[0]), Image.open(grids[-1])
height = options.rows * (before.width // 10)
sheet = Image.new("RGB", (before.width, 2 * height + 12), "white")
sheet.paste(before.crop((0, 0, before.width, height)), (0, 0))
sheet.paste(after.crop((0, 0, after.width, height)), (0, height + 12))
sheet.save(options.target, optimize=True)

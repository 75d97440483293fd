"""Held-out clips of a run, a prompt a row: its frames before training on the left, after it on the right, enlarged.

.venv/bin/python scripts/readme/clips.py scripts/readme/video_moving_shapes.png RUN [--rows 8] [--scale 2]
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from PIL import Image, ImageDraw

TEXT, GAP, SPACE = 190, 16, 4  # pixels: of a prompt, between before and after, between rows


def main(target: Path, run: Path, rows: int, scale: int) -> None:
    sheets = sorted((run / "samples").glob("evaluation-*.png"))
    before, after = (Image.open(sheets[place]).convert("RGB") for place in (0, -1))
    prompts = re.findall(r'<td rowspan="1"><pre>(.*?)</pre></td>', sheets[-1].with_suffix(".html").read_text())
    width, height = before.width, before.height // len(prompts)
    made = Image.new("RGB", (TEXT + 2 * scale * width + GAP, rows * (scale * height + SPACE) - SPACE), "white")
    pen = ImageDraw.Draw(made)
    for row, prompt in enumerate(prompts[:rows]):
        top = row * (scale * height + SPACE)
        pen.text((0, top + scale * height // 2 - 6), prompt, fill="black")
        for place, sheet in enumerate((before, after)):
            strip = sheet.crop((0, row * height, width, (row + 1) * height))
            large = strip.resize((scale * width, scale * height), Image.Resampling.NEAREST)
            made.paste(large, (TEXT + place * (scale * width + GAP), top))
    made.save(target, optimize=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("run", type=Path)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--scale", type=int, default=1)
    main(**vars(parser.parse_args()))

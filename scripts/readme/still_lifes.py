"""Images of the questions about still lifes: each in full size, as the policy of the recipe sees it, and as the tool
zoom shows the requested card.

.venv/bin/python scripts/readme/still_lifes.py scripts/readme/still_lifes.png [--questions 4]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

sys.path.insert(0, str(Path(__file__).parents[2]))
from mmrl.sims.turns.tools import fitted
from mmrl.tasks.visual_qa.data.still_lifes import StillLifesSource

PICTURE, GAP, BAR, COLORS = 224, 18, 20, 128  # pixels: side of an image, gap, height of a line; colors of the file
SEEN, CROP = 32 * 32, 24 * 24  # pixels that the policy of visual_qa_zoom_still_life sees of an image and of a zoom


def main(target: Path, questions: int) -> None:
    """Writes the first held-out questions as an image."""
    source = StillLifesSource("heldout", size=questions, seed=0)
    half = (PICTURE - GAP) // 2
    sheet = Image.new("RGB", (questions * (PICTURE + GAP) - GAP, PICTURE + half + 2 * BAR + GAP), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(11)
    for number in range(questions):
        prompt, left = source[number], number * (PICTURE + GAP)
        image = prompt.images[0]
        assert isinstance(image, Image.Image), "a still life is one image"
        corners = [side * image.width for side in prompt.metadata["target"]]
        parts = (fitted(image, SEEN), fitted(image.crop(tuple(map(round, corners))), CROP))
        pen.text((left, 0), prompt.text, "black", font)
        sheet.paste(image.resize((PICTURE, PICTURE), Image.Resampling.LANCZOS), (left, BAR))
        for position, part in enumerate(parts):
            x = left + position * (half + GAP)
            pen.text((x, PICTURE + BAR + 3), ("the policy sees", "the right zoom")[position], "black", font)
            sheet.paste(part.resize((half, half), Image.Resampling.NEAREST), (x, PICTURE + 2 * BAR))
    sheet.quantize(COLORS, kmeans=2).save(target, optimize=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("--questions", type=int, default=4)
    main(**vars(parser.parse_args()))

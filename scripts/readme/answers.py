"""An animation of what a model makes of the same held-out prompts at every evaluation of a run: answers to questions
about images, or images of scenes. What is right is green, the rest is red.

.venv/bin/python scripts/readme/answers.py scripts/readme/visual_qa_digits.gif RUN [--columns 6] [--rows 2]

It reads the tables of samples that the run wrote, so `log.samples` must be at least columns x rows. The runs of README:

mmrl train visual_qa_digits evaluation.every=16 evaluation.prompts=200 log.samples=40
mmrl train image_shapes evaluation.every=4 evaluation.prompts=48 log.samples=48
"""

from __future__ import annotations

import argparse
import base64
import html
import io
import re
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

sys.path.insert(0, str(Path(__file__).parents[2]))
from scripts.readme.before_after import save_gif

TILE, PICTURE = (150, 160), (138, 72)  # pixels: width and height
BAR = 28  # pixels: the height of the bar with the step
FRAME_MS, LAST_MS = 450, 2500  # milliseconds of a frame, and of the last one
RIGHT, WRONG, BLUE, GREY = (30, 132, 60), (190, 40, 40), (57, 99, 209), (240, 242, 245)


@dataclass(frozen=True)
class Answered:
    """A row of a table of samples. image: the prompt's or, if it has none, the generated one. response: "" for an
    image."""

    image: Image.Image
    prompt: str
    response: str
    right: bool


def read_rows(page: str) -> list[Answered]:
    """Returns the rows of a table of samples, each of which has an image and an accuracy."""
    rows = []
    for row in page.split("<tr")[2:]:
        cells = dict(re.findall(r'<td data-name="(\w+)"[^>]*>(.*?)</td>', row, flags=re.S))
        is_question = "images" in cells
        data = (cells["images"] if is_question else cells["response"]).partition("base64,")[2].partition('"')[0]
        image = Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB")
        prompt, response = (html.unescape(re.sub(r"<.*?>", "", cells[name])).strip() for name in ("prompt", "response"))
        rows.append(Answered(image, prompt, response if is_question else "", float(cells["accuracy"]) == 1.0))
    return rows


def tile(row: Answered) -> Image.Image:
    """Returns a card with the image, the question and the response of a row; the response is on green or red."""
    canvas = Image.new("RGB", TILE, "white")
    pen, small, large = ImageDraw.Draw(canvas), ImageFont.load_default(12), ImageFont.load_default(16)
    pen.rounded_rectangle((2, 2, TILE[0] - 3, TILE[1] - 3), 6, fill=GREY)
    width, height = PICTURE if row.response else (PICTURE[0], PICTURE[1] + 18)  # sentences of images are short
    scale = min(width / row.image.width, height / row.image.height)
    size = (round(row.image.width * scale), round(row.image.height * scale))
    smooth = Image.Resampling.BICUBIC if row.response else Image.Resampling.NEAREST
    canvas.paste(row.image.resize(size, smooth), ((TILE[0] - size[0]) // 2, 6))
    for line, text in enumerate(textwrap.wrap(row.prompt.splitlines()[-1], 23)[:2]):
        pen.text((9, height + 10 + 15 * line), text, fill="black", font=small)
    answer = row.response.splitlines()[-1][:14] if row.response else "right" if row.right else "wrong"
    right = 24 + pen.textlength(answer, font=large)
    pen.rounded_rectangle((8, TILE[1] - 38, right, TILE[1] - 12), 6, fill=RIGHT if row.right else WRONG)
    pen.text((16, TILE[1] - 34), answer, fill="white", font=large)
    return canvas


def animate(target: Path, run: Path, columns: int, rows: int) -> None:
    """Writes the first columns x rows questions of every evaluation of a run as an animated GIF."""
    pages = sorted((run / "samples").glob("evaluation-*.html"))
    last = int(pages[-1].stem.split("-")[1])
    frames = []
    for page in pages:
        step, answered = int(page.stem.split("-")[1]), read_rows(page.read_text())[: columns * rows]
        frame = Image.new("RGB", (columns * TILE[0], rows * TILE[1] + BAR), "white")
        for place, row in enumerate(answered):
            frame.paste(tile(row), (place % columns * TILE[0], BAR + place // columns * TILE[1]))
        pen = ImageDraw.Draw(frame)
        right = sum(row.right for row in answered)
        text = f"step {step} of {last}, {right} of {len(answered)} right"
        pen.text((8, 5), text, fill="black", font=ImageFont.load_default(14))
        pen.rectangle((230, 11, 230 + (frame.width - 240) * step // max(last, 1), 17), fill=BLUE)
        frames.append(frame)
    save_gif(target, frames, FRAME_MS, LAST_MS)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("run", type=Path)
    parser.add_argument("--columns", type=int, default=6)
    parser.add_argument("--rows", type=int, default=2)
    animate(**vars(parser.parse_args()))

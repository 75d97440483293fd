"""A strip of conversations with the tool zoom before and after RL: the image with the box that was zoomed into, what
the policy saw of both, and its answer, green if it is right.

.venv/bin/python scripts/readme/conversations.py scripts/readme/visual_qa_zoom_still_life.png RUN [--questions 4]

It reads the tables of samples of the run's first and last evaluation. An image that several questions are about is
shown once:

mmrl train visual_qa_zoom_still_life log.samples=32
"""

from __future__ import annotations

import argparse
import base64
import html
import io
import re
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

LARGE, SMALL, GAP, TEXT = 232, 74, 10, 28  # pixels: sides of an image and of what the policy sees; gap; text
COLORS = 200  # of the strip
RIGHT, WRONG, FRAME, GREY = (30, 132, 60), (190, 40, 40), (255, 214, 0), (90, 90, 90)


@dataclass(frozen=True)
class Conversation:
    """A row of a table of samples. image: in full size; seen: the images that the policy saw, the image first; box:
    what it zoomed into, in the tool's coordinates, None without a zoom."""

    image: Image.Image
    question: str
    seen: list[Image.Image]
    box: tuple[float, ...] | None
    answer: str
    right: bool


def images(cell: str) -> list[Image.Image]:
    """Decodes the images in a cell of a table."""
    found = re.findall(r"base64,([A-Za-z0-9+/=]+)", cell)
    return [Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB") for data in found]


def read_conversations(page: str) -> list[Conversation]:
    """Returns the conversations of a table of samples."""
    rows = []
    for row in page.split("<tr")[2:]:
        cells = dict(re.findall(r'<td data-name="(\w+)"[^>]*>(.*?)</td>', row, flags=re.S))
        said = [
            html.unescape(one) for one in re.findall(r"response</b> <pre>(.*?)</pre>", cells["response"], flags=re.S)
        ]
        call = re.search(r"zoom\(([-\d., ]+)\)", said[0]) if said else None
        box = tuple(float(side) for side in call.group(1).split(",")) if call else None
        rows.append(
            Conversation(
                images(cells["images"])[0],
                html.unescape(re.sub(r"<.*?>", "", cells["prompt"])).strip(),
                images(cells["response"]),
                box if box is not None and len(box) == 4 else None,
                said[-1].strip() if said else "",
                float(cells["accuracy"]) == 1.0,
            )
        )
    return rows


def one_each(rows: list[Conversation]) -> list[Conversation]:
    """Returns the first conversation about each image."""
    first: dict[bytes, Conversation] = {}
    for row in rows:
        first.setdefault(row.image.tobytes(), row)
    return list(first.values())


def tile(row: Conversation, coordinates: float) -> Image.Image:
    """Returns a card of a conversation. coordinates: the length of an image's side in the tool's coordinates."""
    canvas = Image.new("RGB", (LARGE + GAP + SMALL, LARGE + TEXT), "white")
    image = row.image.resize((LARGE, LARGE), Image.Resampling.LANCZOS)
    if row.box is not None:
        corners = [min(LARGE - 1, max(0, side / coordinates * LARGE)) for side in row.box]
        if corners[0] < corners[2] and corners[1] < corners[3]:
            ImageDraw.Draw(image).rectangle(corners, outline=FRAME, width=3)
    canvas.paste(image, (0, 0))
    pen, small, large = ImageDraw.Draw(canvas), ImageFont.load_default(12), ImageFont.load_default(17)
    left, row_height = LARGE + GAP, SMALL + 26
    for position, seen in enumerate(row.seen[:2]):
        pen.text((left, position * row_height), ("it sees", "it zooms to")[position], GREY, small)
        canvas.paste(seen.resize((SMALL, SMALL), Image.Resampling.NEAREST), (left, position * row_height + 16))
    answer, corner = row.answer[:4] or "nothing", (left, 2 * row_height + 16)
    pen.text((left, 2 * row_height), "it says", GREY, small)
    pen.text((2, LARGE + 6), row.question.splitlines()[-1], "black", small)
    right = corner[0] + 14 + pen.textlength(answer, font=large)
    pen.rounded_rectangle((corner[0], corner[1], right, corner[1] + 26), 5, fill=RIGHT if row.right else WRONG)
    pen.text((corner[0] + 7, corner[1] + 2), answer, "white", large)
    return canvas


def main(target: Path, run: Path, questions: int, coordinates: float) -> None:
    """Writes the first `questions` conversations of a run's first and last evaluation as an image."""
    pages = sorted((run / "samples").glob("evaluation-*.html"))
    bands = [one_each(read_conversations(page.read_text()))[:questions] for page in (pages[0], pages[-1])]
    width, height = LARGE + GAP + SMALL, LARGE + TEXT
    sheet = Image.new("RGB", (questions * (width + 2 * GAP), 2 * (height + 22)), "white")
    pen = ImageDraw.Draw(sheet)
    for band, (name, rows) in enumerate(zip(("before RL", "after RL"), bands, strict=True)):
        top = band * (height + 22)
        right = sum(row.right for row in rows)
        pen.text((0, top), f"{name}: {right} of these {len(rows)} right", "black", ImageFont.load_default(14))
        for position, row in enumerate(rows):
            sheet.paste(tile(row, coordinates), (position * (width + 2 * GAP), top + 22))
    sheet.quantize(COLORS, kmeans=2).save(target, optimize=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("run", type=Path)
    parser.add_argument("--questions", type=int, default=4)
    parser.add_argument("--coordinates", type=float, default=4.0)
    main(**vars(parser.parse_args()))

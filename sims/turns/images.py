"""Tools that crop, transform, annotate or read an image.

Images are numbered from 0 in the order in which the policy has seen them. Coordinates are x from the left and y from
the top, in the unit of the environment's option `coordinates`.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal

from PIL import Image, ImageDraw

from mmrl.rewards.reading import reader
from mmrl.sims.turns.tools import Scene, Tool, ToolError, fitted

Number = Annotated[int, "which image, counted from 0"]


def zoom(pixels: int, *, related: bool = True) -> Tool:
    """Returns a tool that crops an image. pixels: larger crops are reduced to this size. related: whether the crop is
    the requested box, or (as a control) a box of the same size elsewhere."""

    def crop(
        scene: Scene,
        left: Annotated[float, "x of the box's left side"],
        top: Annotated[float, "y of its upper side"],
        right: Annotated[float, "x of its right side"],
        bottom: Annotated[float, "y of its lower side"],
        image: Number = 0,
    ) -> Image.Image:
        """Shows the part of an image that lies in a box, as large as it is in the original."""
        whole = scene.image(image)
        box = _box(scene, left, top, right, bottom, image)
        scene.facts |= {"box": list(box), "image": image}
        part = _part(whole, box)  # first: a box smaller than a pixel is refused
        if not related:
            part = _part(whole, _elsewhere(box, whole))
        return scene.show(part, fitted(part, pixels))

    return Tool.of(crop, "zoom")


def _box(
    scene: Scene, left: float, top: float, right: float, bottom: float, image: int
) -> tuple[float, float, float, float]:
    """Returns a box as fractions of the image's width and height, clipped to 0..1. Raises ToolError for one that is
    empty."""
    x0, y0 = scene.unit(left, top, image)
    x1, y1 = scene.unit(right, bottom, image)
    x0, y0, x1, y1 = (min(1.0, max(0.0, value)) for value in (x0, y0, x1, y1))
    if x1 <= x0 or y1 <= y0:
        raise ToolError("the box is empty: left must be below right and top below bottom, inside the image")
    return x0, y0, x1, y1


def _elsewhere(box: tuple[float, float, float, float], image: Image.Image) -> tuple[float, float, float, float]:
    """Returns a box of the same size elsewhere, if possible without overlap. It is pseudo-random: the image and the box
    are the seed.

    It is a cell of the grid whose cells have the size of the box. Cells are counted, not listed, since the grid of a
    tiny box is huge.
    """
    width, height = box[2] - box[0], box[3] - box[1]
    digest = hashlib.sha256(image.tobytes() + repr(box).encode()).digest()
    columns, rows = max(1, int(1 / width + 1e-6)), max(1, int(1 / height + 1e-6))
    across, down = _overlapping(box[0], width, columns), _overlapping(box[1], height, rows)
    overlapping = [column * rows + row for column in across for row in down]
    num_apart = columns * rows - len(overlapping)
    index = int.from_bytes(digest[:4], "big") % (num_apart or len(overlapping))
    if num_apart:
        for taken in overlapping:  # in ascending order; the index counts only cells that do not overlap
            index += taken <= index
    x, y = index // rows * width, index % rows * height
    return x, y, x + width, y + height


def _overlapping(begin: float, length: float, count: int) -> list[int]:
    """Returns which of `count` adjacent intervals of `length`, the first of which begins at 0, overlap the interval of
    the same length at `begin`: one or two."""
    near = int(begin / length)
    return [k for k in range(max(0, near - 1), min(count, near + 3)) if abs(k * length - begin) < length - 1e-6]


def ocr(pixels: int, characters: int, threads: int = 1) -> Tool:
    """Returns a tool that reads the text of an image. pixels: larger images are reduced to this size. characters: the
    maximum length of the returned text. threads: CPU threads of the reader."""

    def text(
        scene: Scene,
        left: Annotated[float | None, "x of the box's left side; without a box the whole image is read"] = None,
        top: Annotated[float | None, "y of its upper side"] = None,
        right: Annotated[float | None, "x of its right side"] = None,
        bottom: Annotated[float | None, "y of its lower side"] = None,
        image: Number = 0,
    ) -> str:
        """Reads the text in an image, or in the part of it that lies in a box, as large as it is in the original."""
        whole = scene.image(image)
        box = 0.0, 0.0, 1.0, 1.0
        if left is not None and top is not None and right is not None and bottom is not None:
            box = _box(scene, left, top, right, bottom, image)
        elif (left, top, right, bottom) != (None, None, None, None):
            raise ToolError("give all of left, top, right and bottom, or none of them to read the whole image")
        scene.facts |= {"box": list(box), "image": image}
        content = "\n".join(reader(threads)(fitted(_part(whole, box), pixels)))
        if len(content) > characters:
            content = f"{content[:characters]}... ({len(content) - characters} characters more: read a part of it)"
        return content or "(no text)"

    return Tool.of(text, "ocr")


def _part(whole: Image.Image, box: tuple[float, float, float, float]) -> Image.Image:
    """Returns the crop of a box, given in fractions of width and height and rounded to pixels. Raises ToolError if it
    is smaller than a pixel."""
    width, height = whole.size
    x0, x1 = (min(width, max(0, round(share * width))) for share in (box[0], box[2]))
    y0, y1 = (min(height, max(0, round(share * height))) for share in (box[1], box[3]))
    if x1 <= x0 or y1 <= y0:
        raise ToolError("the box is smaller than a pixel")
    return whole.crop((x0, y0, x1, y1))


def rotate() -> Tool:
    """Returns a tool that turns an image."""

    def turn(scene: Scene, degrees: Annotated[int, "clockwise; a multiple of 90"], image: Number = 0) -> Image.Image:
        """Shows an image turned clockwise."""
        if degrees % 90:
            raise ToolError("degrees must be a multiple of 90")
        return _change_both(scene, image, lambda one: one.rotate(-degrees, expand=True))

    return Tool.of(turn, "rotate")


def flip() -> Tool:
    """Returns a tool that mirrors an image."""

    def mirror(
        scene: Scene,
        axis: Annotated[Literal["horizontal", "vertical"], "horizontal: left becomes right"],
        image: Number = 0,
    ) -> Image.Image:
        """Shows an image mirrored."""
        method = Image.Transpose.FLIP_LEFT_RIGHT if axis == "horizontal" else Image.Transpose.FLIP_TOP_BOTTOM
        return _change_both(scene, image, lambda one: one.transpose(method))

    return Tool.of(mirror, "flip")


def mark() -> Tool:
    """Returns a tool that draws a box on an image."""

    def frame(
        scene: Scene,
        left: Annotated[float, "x of the box's left side"],
        top: Annotated[float, "y of its upper side"],
        right: Annotated[float, "x of its right side"],
        bottom: Annotated[float, "y of its lower side"],
        image: Number = 0,
    ) -> Image.Image:
        """Shows an image with a red frame around a box."""
        scene.image(image)  # refuses a number without an image
        box = _box(scene, left, top, right, bottom, image)
        scene.facts |= {"box": list(box), "image": image}
        return _change_both(scene, image, lambda one: framed(one, box))

    return Tool.of(frame, "mark")


def framed(image: Image.Image, box: tuple[float, float, float, float], colour: str = "red") -> Image.Image:
    """Returns a copy of the image with a frame around a box (left, top, right, bottom), in fractions of its width and
    height."""
    drawn = image.convert("RGB")
    width, height = drawn.size
    x0, x1 = (min(width - 1, max(0, round(share * width))) for share in (box[0], box[2]))
    y0, y1 = (min(height - 1, max(0, round(share * height))) for share in (box[1], box[3]))
    ImageDraw.Draw(drawn).rectangle((x0, y0, max(x0, x1), max(y0, y1)), outline=colour, width=max(1, width // 200))
    return drawn


def _change_both(scene: Scene, number: int, change) -> Image.Image:  # type: ignore[no-untyped-def]
    """Applies `change` to the original of an image and to the version that the policy saw. Returns the latter."""
    whole = scene.image(number)
    return scene.show(change(whole), change(scene.shown[number]))

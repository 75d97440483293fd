"""Conversion of images to RGB as viewers display them, and images in data URLs."""

from __future__ import annotations

import base64
import binascii
from urllib.parse import unquote, urlsplit

import numpy as np
from PIL import Image

ORIENTATION = 0x0112  # the EXIF tag
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
SIXTEEN_BIT = ("I;16", "I;16L", "I;16B", "I;16N")
PLAIN = ("1", "L", "P", "RGB", "RGBX", "CMYK", "YCbCr", "HSV")
TRANSPARENT = ("LA", "La", "PA", "RGBA", "RGBa")


def check_mode(image: Image.Image) -> None:
    """Raises ValueError for image modes whose pixels have no known display range: 32-bit numbers and Lab."""
    if image.mode not in (*PLAIN, *TRANSPARENT, *SIXTEEN_BIT):
        raise ValueError(
            f"pixels of Pillow's mode {image.mode} have no known range; save the image with 8 or 16 bits, as RGB"
        )


def to_rgb(image: Image.Image) -> Image.Image:
    """Returns an image as viewers show it, in RGB: upright by its EXIF orientation, on white where it is transparent,
    16 bits of grey as 8. Raises ValueError as `check_mode`, and what a decoder raises.

    transformers and vLLM turn images in the same way, and vLLM uses white too.
    """
    check_mode(image)
    image.load()  # reads the orientation of a PNG that comes after its pixels, and turns a TIFF
    turn = UPRIGHT.get(_orientation(image))
    shown = _on_white(image)
    return shown if turn is None else shown.transpose(turn)


def _orientation(image: Image.Image) -> int:
    """Returns the EXIF orientation of an image, 1 to 8; 1 (upright) if it has none."""
    try:
        return int(image.getexif().get(ORIENTATION, 1))
    except Exception:  # damaged EXIF, which viewers ignore too
        return 1


def _on_white(image: Image.Image) -> Image.Image:
    """Converts an image of any mode to RGB: transparency on white, 16 bits rounded to 8."""
    if image.mode in SIXTEEN_BIT:
        values = np.asarray(image).astype(np.uint32)
        grey = ((values + 128) // 257).astype(np.uint8)  # rounded; 65535 / 257 is 255
        clear = image.info.get("transparency")
        shown = grey if clear is None else np.where(values == clear, np.uint8(255), grey)
        return Image.fromarray(shown).convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    if image.mode == "La":
        image = image.convert("LA")
    drawn = image.convert("RGBA")
    white = Image.new("RGB", drawn.size, "white")
    white.paste(drawn, mask=drawn.getchannel("A"))
    return white


def decode_data_url(url: str) -> bytes:
    """Returns the bytes of the image file in a data URL, data:image/png;base64,... Raises ValueError for other URLs."""
    head, mark, data = url.partition(",")
    if not head.lower().startswith("data:image/") or not mark:
        raise ValueError(
            f"{url[:40]!r}: images are not fetched from the web; write a path, or data:image/png;base64,..."
        )
    text = unquote(data)
    if not head.lower().endswith(";base64"):
        raise ValueError(f"{head!r:.40}: only base64 is read; write data:image/png;base64,...")
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except binascii.Error as error:
        raise ValueError(f"{head!r:.40}: {error}") from None


def local_path(url: str) -> str:
    """Returns the path that a URL file:///... names. Raises ValueError for one of another host."""
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise ValueError(f"{url[:60]!r} lies on another host; write file:///path")
    return unquote(parts.path)

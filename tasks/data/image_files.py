"""Images that a data file names or holds. The file may be somebody else's: it can open images below one folder, and
nothing else."""

from __future__ import annotations

import io
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, TypeVar

from PIL import Image

from mmrl.runtime.images import check_mode, decode_data_url, local_path, to_rgb
from mmrl.runtime.jsonl import RowError
from mmrl.tasks.data.bounds import MAX_PIXELS, MAX_RATIO

KEYS = ("bytes", "url", "image_url", "path", "image", "video")  # of a mapping, in the order in which they count
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:(//|image/)")
T = TypeVar("T")
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")  # decoded by libraries; Pillow knows some that are programs


@dataclass(frozen=True)
class ImageFiles:
    """Opens the images that rows refer to, within one folder and up to a size.

    An image is a path below `root` (None: no path can be used), file:///path, data:image/png;base64,..., the bytes of a
    file, a mapping that holds one of these as `bytes`, `path`, `url` or `image`, or a PIL image. Links are resolved
    before that is checked.
    """

    root: Path | None = None
    max_pixels: int = MAX_PIXELS

    def check(self, image: object) -> None:
        """Raises RowError for an image that cannot be used, as far as its header tells."""
        if isinstance(image, Image.Image):
            _converted(image, check_mode)
        else:
            with self._opened(image) as opened:
                check_mode(opened)

    def decoded(self, image: object) -> Image.Image:
        """Returns the image in RGB. Raises RowError for an image that cannot be used."""
        if isinstance(image, Image.Image):
            return _converted(image, to_rgb)
        with self._opened(image) as opened:
            return to_rgb(opened)

    def file(self, image: object) -> tuple[str, BinaryIO]:
        """Returns a name for messages, and a stream of the bytes. Raises RowError for a file that may not be opened."""
        reference = _reference(image)
        if isinstance(reference, bytes):
            return "bytes", io.BytesIO(reference)
        try:
            if not _URL.match(reference):
                return repr(reference), self._file(reference)
            if not reference.lower().startswith("file:"):
                return repr(reference[:40]), io.BytesIO(decode_data_url(reference))
            path = local_path(reference)
        except ValueError as error:
            raise RowError(str(error)) from None
        return repr(reference), self._file(path)

    def check_size(self, what: str, width: int, height: int) -> None:
        """Raises RowError for a size that may not be decoded."""
        if width * height > self.max_pixels:
            raise RowError(f"{what} has {width} x {height} pixels, more than max_pixels={self.max_pixels}")
        if max(width, height) > MAX_RATIO * min(width, height):
            raise RowError(f"{what} has {width} x {height} pixels; sides may be 1 : {MAX_RATIO}")

    @contextmanager
    def _opened(self, image: object) -> Iterator[Image.Image]:
        what, file = self.file(image)
        try:
            with file, Image.open(file, formats=FORMATS) as opened:
                self.check_size(what, *opened.size)
                yield opened
        except RowError:
            raise
        except Image.UnidentifiedImageError:
            raise RowError(f"cannot read {what}: no {', '.join(FORMATS[:-1])} or {FORMATS[-1]}") from None
        except Exception as error:  # any error of a decoder, for bytes that have not been checked
            raise RowError(f"cannot read {what}: {' '.join(str(error).split()) or type(error).__name__}") from None

    def _file(self, path: str) -> BinaryIO:
        """Opens the regular file at a path. A pipe or a device does not block."""
        try:
            descriptor = os.open(self._below_root(path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        except (OSError, ValueError) as error:
            raise RowError(f"cannot read {path!r}: {error}") from None
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise RowError(f"{path!r} is not a regular file")
        return os.fdopen(descriptor, "rb")

    def _below_root(self, path: str) -> str:
        """Returns the real path of a file below image_root. Raises RowError for one outside of it."""
        if self.root is None:
            raise RowError(f"{path!r} is a path, but there is no image_root that it could lie in")
        parts = path.split("/")
        if ".." in parts:
            raise RowError(f"{path!r} goes up by ..; write it relative to image_root={self.root}")
        resolved = os.path.realpath(os.path.join(self._real_root, path))
        if not resolved.startswith(os.path.join(self._real_root, "")):
            raise RowError(f"{path!r} leads out of image_root={self.root}")
        return resolved

    @cached_property
    def _real_root(self) -> str:
        assert self.root is not None
        return os.path.realpath(self.root)


def _reference(image: object) -> str | bytes:
    """Returns the path, the URL or the bytes by which a row names an image. Raises RowError where it names none."""
    while isinstance(image, Mapping):
        if isinstance(image.get("bytes"), str):
            break  # text where the bytes of a file belong
        image = next((image[key] for key in KEYS if image.get(key)), None)
    if isinstance(image, bytes | bytearray) and image:
        return bytes(image)
    if isinstance(image, str) and image:
        return image
    raise RowError("neither a path nor bytes")


def _converted(image: Image.Image, convert: Callable[[Image.Image], T]) -> T:
    """Returns `convert` of an image that is decoded already. Raises RowError where it refuses the image."""
    try:
        return convert(image)
    except (ValueError, OSError) as error:
        raise RowError(str(error)) from None

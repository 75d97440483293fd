"""Images that a data file names or holds. The data file is not trusted: it can open images below one folder only."""

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

KEYS = ("bytes", "url", "image_url", "path", "image", "video")  # keys of a mapping; the first with a value is used
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:(//|image/)")
T = TypeVar("T")
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")  # Pillow decodes some other formats by starting a program


@dataclass(frozen=True)
class ImageFiles:
    """Opens the images that rows of a data file refer to.

    A row refers to an image by a path below `root`, file:///path, data:image/png;base64,..., the bytes of a file, a
    mapping that holds one of these as `bytes`, `path`, `url` or `image`, or a PIL image. Symbolic links are resolved
    before a path is compared with `root`; if `root` is None, no path can be used. An image may have up to `max_pixels`
    pixels.
    """

    root: Path | None = None
    max_pixels: int = MAX_PIXELS

    def check(self, image: object) -> None:
        """Checks an image by its header, without decoding it. Raises RowError if it cannot be used."""
        if isinstance(image, Image.Image):
            _converted(image, check_mode)
        else:
            with self._opened(image) as opened:
                check_mode(opened)

    def decode(self, image: object) -> Image.Image:
        """Decodes an image to RGB. Raises RowError if it cannot be used."""
        if isinstance(image, Image.Image):
            return _converted(image, to_rgb)
        with self._opened(image) as opened:
            return to_rgb(opened)

    def open(self, image: object) -> tuple[str, BinaryIO]:
        """Opens an image file. Returns its name for error messages and a stream of its bytes. Raises RowError if the
        file may not be opened."""
        reference = _reference(image)
        if isinstance(reference, bytes):
            return "bytes", io.BytesIO(reference)
        try:
            if not _URL.match(reference):
                return repr(reference), self._open_path(reference)
            if not reference.lower().startswith("file:"):
                return repr(reference[:40]), io.BytesIO(decode_data_url(reference))
            path = local_path(reference)
        except ValueError as error:
            raise RowError(str(error)) from None
        return repr(reference), self._open_path(path)

    def check_size(self, name: str, width: int, height: int) -> None:
        """Raises RowError if an image of `width` x `height` pixels is too large or too narrow. name: for the
        message."""
        if width * height > self.max_pixels:
            raise RowError(
                f"{name} has {width} x {height} pixels, more than max_pixels={self.max_pixels}; resize the image"
            )
        if max(width, height) > MAX_RATIO * min(width, height):
            raise RowError(f"{name} has {width} x {height} pixels, whose sides have a ratio above {MAX_RATIO}; crop it")

    @contextmanager
    def _opened(self, image: object) -> Iterator[Image.Image]:
        """Opens an image file and checks its size; only its header is read. Raises RowError if it cannot be used, also
        for errors of Pillow while the caller decodes it."""
        name, file = self.open(image)
        try:
            with file, Image.open(file, formats=FORMATS) as opened:
                self.check_size(name, *opened.size)
                yield opened
        except RowError:
            raise
        except Image.UnidentifiedImageError:
            raise RowError(f"cannot read {name}: not a {', '.join(FORMATS[:-1])} or {FORMATS[-1]} file") from None
        except Exception as error:  # a decoder can raise anything for untrusted bytes
            raise RowError(f"cannot read {name}: {' '.join(str(error).split()) or type(error).__name__}") from None

    def _open_path(self, path: str) -> BinaryIO:
        """Opens the regular file at a path. Raises RowError for anything else, such as a pipe, without blocking on
        it."""
        try:
            descriptor = os.open(self._below_root(path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        except (OSError, ValueError) as error:
            raise RowError(f"cannot read {path!r}: {error}") from None
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise RowError(f"{path!r} is not a regular file; name an image file")
        return os.fdopen(descriptor, "rb")

    def _below_root(self, path: str) -> str:
        """Returns the path of a file below image_root with links resolved. Raises RowError if it lies outside."""
        if self.root is None:
            raise RowError(
                f"{path!r} is a path, but image_root is not set; set task.data.image_root to the folder of the images"
            )
        parts = path.split("/")
        if ".." in parts:
            raise RowError(f"{path!r} contains '..'; write it relative to image_root={self.root}")
        resolved = os.path.realpath(os.path.join(self._real_root, path))
        if not resolved.startswith(os.path.join(self._real_root, "")):
            raise RowError(f"{path!r} lies outside of image_root={self.root}; move the file into that folder")
        return resolved

    @cached_property
    def _real_root(self) -> str:
        assert self.root is not None
        return os.path.realpath(self.root)


def _reference(image: object) -> str | bytes:
    """Returns the path, URL or bytes of an image. A mapping is replaced by its first value under one of KEYS, also if
    that is a mapping again. Raises RowError if there is none."""
    while isinstance(image, Mapping):
        if isinstance(image.get("bytes"), str):
            break  # `bytes` must not be text: the error below says so
        image = next((image[key] for key in KEYS if image.get(key)), None)
    if isinstance(image, bytes | bytearray) and image:
        return bytes(image)
    if isinstance(image, str) and image:
        return image
    raise RowError("the image is neither a path, a URL nor bytes; write the path of a file")


def _converted(image: Image.Image, convert: Callable[[Image.Image], T]) -> T:
    """Returns `convert(image)`. Raises RowError if that raises ValueError or OSError."""
    try:
        return convert(image)
    except (ValueError, OSError) as error:
        raise RowError(str(error)) from None

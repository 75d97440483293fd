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
from typing import Any, BinaryIO, TypeVar

from PIL import Image

from mmrl.runtime.images import as_shown, check_mode, embedded, local_path
from mmrl.runtime.jsonl import RowError
from mmrl.tasks.visual_qa.data.bounds import MAX_PIXELS, MAX_RATIO

KEYS = ("bytes", "url", "image_url", "path", "image", "video")  # of a mapping, in the order in which they count
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:(//|image/)")
T = TypeVar("T")
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")  # decoded by libraries; Pillow knows some that are programs


@dataclass(frozen=True)
class ImageFiles:
    """Where images may lie and how large they may be.

    An image is a path below `root` (None: no path can be used), file:///path, data:image/png;base64,..., the bytes of a
    file, a mapping that holds one of these as `bytes`, `path`, `url` or `image`, or a PIL image. Links are followed
    before it is asked what is below.
    """

    root: Path | None = None
    max_pixels: int = MAX_PIXELS

    def check(self, image: Any) -> None:
        """Raises RowError for an image that cannot be used, as far as its header tells."""
        if isinstance(image, Image.Image):
            _shown(image, check_mode)
        else:
            with self._opened(image) as opened:
                check_mode(opened)

    def decoded(self, image: Any) -> Image.Image:
        """RGB. Raises RowError for an image that cannot be used."""
        if isinstance(image, Image.Image):
            return _shown(image, as_shown)
        with self._opened(image) as opened:
            return as_shown(opened)

    def file(self, image: Any) -> tuple[str, BinaryIO]:
        """Returns what a message calls it, and its bytes to read. Raises RowError for what may not be opened."""
        held = _held(image)
        if isinstance(held, bytes):
            return "bytes", io.BytesIO(held)
        try:
            if not _URL.match(held):
                return repr(held), self._file(held)
            if not held.lower().startswith("file:"):
                return repr(held[:40]), io.BytesIO(embedded(held))
            path = local_path(held)
        except ValueError as error:
            raise RowError(str(error)) from None
        return repr(held), self._file(path)

    def check_size(self, what: str, width: int, height: int) -> None:
        """Raises RowError for a size that may not be decoded."""
        if width * height > self.max_pixels:
            raise RowError(f"{what} has {width} x {height} pixels, more than max_pixels={self.max_pixels}")
        if max(width, height) > MAX_RATIO * min(width, height):
            raise RowError(f"{what} has {width} x {height} pixels; sides may be 1 : {MAX_RATIO}")

    @contextmanager
    def _opened(self, image: Any) -> Iterator[Image.Image]:
        what, file = self.file(image)
        try:
            with file, Image.open(file, formats=FORMATS) as opened:
                self.check_size(what, *opened.size)
                yield opened
        except RowError:
            raise
        except Image.UnidentifiedImageError:
            raise RowError(f"cannot read {what}: no {', '.join(FORMATS[:-1])} or {FORMATS[-1]}") from None
        except Exception as error:  # whatever a decoder says of bytes that nobody has checked
            raise RowError(f"cannot read {what}: {' '.join(str(error).split()) or type(error).__name__}") from None

    def _file(self, path: str) -> BinaryIO:
        """The regular file at a path, opened. A pipe or a device in its place is not waited for."""
        try:
            descriptor = os.open(self._below_root(path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        except (OSError, ValueError) as error:
            raise RowError(f"cannot read {path!r}: {error}") from None
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise RowError(f"{path!r} is no regular file")
        return os.fdopen(descriptor, "rb")

    def _below_root(self, path: str) -> str:
        if self.root is None:
            raise RowError(f"{path!r} is a path, but there is no image_root that it could lie in")
        parts = path.split("/")
        if ".." in parts:
            raise RowError(f"{path!r} goes up by ..; write it relative to image_root={self.root}")
        found = os.path.realpath(os.path.join(self._real_root, path))
        if not found.startswith(os.path.join(self._real_root, "")):
            raise RowError(f"{path!r} leads out of image_root={self.root}")
        return found

    @cached_property
    def _real_root(self) -> str:
        assert self.root is not None
        return os.path.realpath(self.root)


def _held(image: Any) -> str | bytes:
    """Returns the path, the URL or the bytes by which a row gives an image. Raises RowError where it gives none."""
    while isinstance(image, Mapping):
        if isinstance(image.get("bytes"), str):
            break  # text where the bytes of a file belong
        image = next((image[key] for key in KEYS if image.get(key)), None)
    if isinstance(image, bytes | bytearray) and image:
        return bytes(image)
    if isinstance(image, str) and image:
        return image
    raise RowError("neither a path nor bytes")


def _shown(image: Image.Image, show: Callable[[Image.Image], T]) -> T:
    """Raises RowError where `show` refuses an image that is decoded already."""
    try:
        return show(image)
    except (ValueError, OSError) as error:
        raise RowError(str(error)) from None

"""Images of demonstrated episodes: slices that are decoded when they are read, and the lengths of videos."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import imageio_ffmpeg
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mmrl.errors import UserError
from mmrl.runtime.progress import display

Decoder = Callable[[int, int], NDArray[np.uint8]]  # first frame and how many -> [frame, height, width, 3]


class Frames:
    """The images of one episode: slices are decoded when they are read; with `keep` the whole episode is then
    cached."""

    def __init__(self, length: int, decode: Decoder, keep: bool) -> None:
        self.length, self.decode, self.keep = length, decode, keep
        self.cached: NDArray[np.uint8] | None = None

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: slice) -> NDArray[np.uint8]:
        """Returns the images of a slice of step 1, [frame, height, width, 3]."""
        first, last, step = index.indices(self.length)
        assert step == 1
        if not self.keep:
            return self.decode(first, last - first)
        if self.cached is None:
            self.cached = self.decode(0, self.length)
        return self.cached[first:last]


class VideoLengths:
    """The numbers of frames of videos, or why they cannot be read; nothing of videos that were not counted."""

    def __init__(self) -> None:
        self._frames: dict[Path, int | str] = {}

    def count(self, files: Sequence[Path]) -> None:
        with display.work("videos", len(files)) as work, ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            for file, frames in zip(files, pool.map(_frames_of, files), strict=True):
                self._frames[file] = frames
                work.advance()

    def check(self, file: Path, end: int) -> None:
        """Raises UserError for a video that cannot be read or has no frame `end` - 1."""
        frames = self._frames.get(file)
        if isinstance(frames, str):
            raise UserError(f"{file} cannot be read: {frames}")
        if frames is not None and frames < end:
            raise UserError(f"{file} ends before frame {end}; its index says otherwise")


def read_video(file: Path, first: int, count: int, fps: float) -> NDArray[np.uint8]:
    """Reads frames `first` to `first + count` of a video of a constant rate: [count, height, width, 3].

    Raises UserError if it has fewer.
    """
    seek = ["-ss", f"{(first - 0.5) / fps:.6f}"] if first else []  # half a frame early: times are rounded
    frames = imageio_ffmpeg.read_frames(
        str(file),
        pix_fmt="rgb24",
        input_params=seek,
        output_params=["-frames:v", str(count), "-fps_mode", "passthrough"],
    )
    width, height = next(frames)["size"]
    images = [np.frombuffer(frame, np.uint8).reshape(height, width, 3) for frame in frames]
    if len(images) != count:
        raise UserError(f"{file} ends before frame {first + count}; its index says otherwise")
    return np.stack(images)


def _frames_of(file: Path) -> int | str:
    """Returns the number of frames of a video, without decoding them, or why it cannot be read."""
    try:
        return int(imageio_ffmpeg.count_frames_and_secs(str(file))[0])
    except (OSError, RuntimeError) as error:
        return f"{error}".splitlines()[0]


def resized(frames: Iterable[NDArray[np.uint8]], size: tuple[int, int]) -> NDArray[np.uint8]:
    height, width = size
    whole = [Image.fromarray(frame) for frame in frames]
    return np.stack([np.asarray(i if i.size == (width, height) else i.resize((width, height))) for i in whole])

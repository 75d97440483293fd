"""Lazily decoded images of demonstrated episodes, and the lengths of videos."""

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

# Decodes frames: index of the first frame, number of frames -> [frame, height, width, 3].
Decoder = Callable[[int, int], NDArray[np.uint8]]


class Frames:
    """The images of one episode, decoded on access. keep: the first access decodes and caches the full episode."""

    def __init__(self, length: int, decode: Decoder, keep: bool) -> None:
        self.length, self.decode, self.keep = length, decode, keep
        self.cached: NDArray[np.uint8] | None = None

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: slice) -> NDArray[np.uint8]:
        """Returns the images of a slice of step 1, [frame, height, width, 3]. With `keep` the first access decodes all
        images, and caches them."""
        first, last, step = index.indices(self.length)
        assert step == 1
        if not self.keep:
            return self.decode(first, last - first)
        if self.cached is None:
            self.cached = self.decode(0, self.length)
        return self.cached[first:last]


class VideoLengths:
    """Counts the frames of videos, and checks that videos are long enough."""

    def __init__(self) -> None:
        self._frames: dict[Path, int | str] = {}  # the number of frames, or why a video cannot be read

    def count(self, files: Sequence[Path]) -> None:
        """Counts the frames of videos in parallel."""
        with display.work("videos", len(files)) as work, ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            for file, frames in zip(files, pool.map(_frames_of, files), strict=True):
                self._frames[file] = frames
                work.advance()

    def check(self, file: Path, end: int) -> None:
        """Raises UserError if a counted video cannot be read, or has fewer than `end` frames."""
        frames = self._frames.get(file)
        if isinstance(frames, str):
            raise UserError(f"{file} cannot be read: {frames}")
        if frames is not None and frames < end:
            raise UserError(
                f"{file} has {frames} frames, but {end} according to the dataset's meta/; copy the dataset again"
            )


def read_video(file: Path, first: int, num_frames: int, fps: float) -> NDArray[np.uint8]:
    """Reads `num_frames` frames from frame `first` on, of a video of the constant rate `fps`: [frame, height, width,
    3].

    Raises UserError if it has fewer.
    """
    seek = ["-ss", f"{(first - 0.5) / fps:.6f}"] if first else []  # half a frame early, since times are rounded
    frames = imageio_ffmpeg.read_frames(
        str(file),
        pix_fmt="rgb24",
        input_params=seek,
        output_params=["-frames:v", str(num_frames), "-fps_mode", "passthrough"],
    )
    width, height = next(frames)["size"]
    images = [np.frombuffer(frame, np.uint8).reshape(height, width, 3) for frame in frames]
    if len(images) != num_frames:
        end = first + num_frames
        raise UserError(
            f"{file} has {first + len(images)} frames, but {end} according to the dataset's meta/; copy the dataset "
            "again"
        )
    return np.stack(images)


def _frames_of(file: Path) -> int | str:
    """Returns the number of frames of a video, without decoding them, or why it cannot be read."""
    try:
        return int(imageio_ffmpeg.count_frames_and_secs(str(file))[0])
    except (OSError, RuntimeError) as error:
        return f"{error}".splitlines()[0]


def resize(frames: Iterable[NDArray[np.uint8]], size: tuple[int, int]) -> NDArray[np.uint8]:
    """Resizes frames [height, width, 3] to `size` (height, width), where they differ: [frame, height, width, 3]."""
    height, width = size
    images = [Image.fromarray(frame) for frame in frames]
    return np.stack([np.asarray(i if i.size == (width, height) else i.resize((width, height))) for i in images])

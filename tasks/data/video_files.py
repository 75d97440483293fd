"""Videos that a data file names or holds: animated GIF, WebP and PNG, and MP4, MOV and WebM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, BinaryIO

from PIL import Image

from mmrl.rollouts import Video
from mmrl.runtime.images import to_rgb
from mmrl.runtime.jsonl import RowError
from mmrl.tasks.data.bounds import MAX_ANIMATION_PIXELS, MAX_FRAMES, MAX_VIDEO_PIXELS
from mmrl.tasks.data.image_files import ImageFiles

ANIMATED = ("GIF", "WEBP", "PNG")
DEFAULT_FPS = 10.0  # for an animation that does not say how long a frame lasts
HEADER_BYTES = 12  # enough to recognise the format of a file


@dataclass(frozen=True)
class VideoFiles:
    """Opens the videos that rows of a data file refer to, and keeps at most `max_frames` evenly spaced frames of each.

    Folder and frame size are limited as `image_files` says. Formats are recognised by a file's first bytes, so that a
    playlist cannot make the decoder open other files.
    """

    image_files: ImageFiles = ImageFiles()
    max_frames: int = MAX_FRAMES

    def check(self, video: object) -> None:
        """Reads the header and the first frame of a video. Raises RowError if these cannot be used."""
        name, file = self.image_files.open(video)
        with file:
            self._read(name, file, first_frame_only=True)

    def decode(self, video: object) -> Video:
        """Decodes a video: its frames in RGB, with their rate. Raises RowError if it cannot be used."""
        name, file = self.image_files.open(video)
        with file:
            return self._read(name, file, first_frame_only=False)

    def _read(self, name: str, file: BinaryIO, *, first_frame_only: bool) -> Video:
        """Reads a video in the format that its first bytes show. name: for messages. Raises RowError."""
        start = file.read(HEADER_BYTES)
        file.seek(0)
        try:
            # MP4 and MOV have "ftyp" after 4 bytes; WebM begins with the EBML header.
            if start[4:8] == b"ftyp" or start[:4] == b"\x1aE\xdf\xa3":
                return self._read_ffmpeg(
                    name, file.read(), ".mp4" if start[4:8] == b"ftyp" else ".webm", first_frame_only
                )
            return self._read_animation(name, file, first_frame_only)
        except RowError:
            raise
        except Image.UnidentifiedImageError:
            raise RowError(f"cannot read {name}: not an MP4, MOV, WebM, {', '.join(ANIMATED)} file") from None
        except Exception as error:  # a decoder can raise anything for untrusted bytes
            raise RowError(f"cannot read {name}: {' '.join(str(error).split()) or type(error).__name__}") from None

    def _read_animation(self, name: str, file: BinaryIO, first_frame_only: bool) -> Video:
        """Reads up to max_frames evenly spaced frames of an animated image. The video's fps counts these frames only;
        all frames of the file are assumed to last as long as the last one that is read."""
        with Image.open(file, formats=ANIMATED) as opened:
            self.image_files.check_size(name, *opened.size)
            num_frames = opened.n_frames  # type: ignore[attr-defined]  # all of ANIMATED have it
            check_length(name, num_frames, *opened.size, max_pixels=MAX_ANIMATION_PIXELS)
            indices = evenly_spaced(num_frames, 1 if first_frame_only else self.max_frames)
            frames, duration_ms = [], 0.0
            for index in indices:
                opened.seek(index)
                frames.append(to_rgb(opened))
                duration_ms = float(opened.info.get("duration", 0))
        fps = 1000 / duration_ms if duration_ms > 0 else DEFAULT_FPS
        return Video(tuple(frames), fps * len(indices) / num_frames)

    def _read_ffmpeg(self, name: str, data: bytes, extension: str, first_frame_only: bool) -> Video:
        """Reads up to max_frames evenly spaced frames of a video by FFmpeg. Its fps counts these frames only."""
        import imageio.v3 as iio

        file: dict[str, Any] = {"uri": data, "plugin": "FFMPEG", "extension": extension}
        metadata = iio.immeta(**file)
        self.image_files.check_size(name, *metadata["size"])
        num_frames = max(1, round(metadata["fps"] * metadata["duration"]))
        check_length(name, num_frames, *metadata["size"], max_pixels=MAX_VIDEO_PIXELS)
        indices = evenly_spaced(num_frames, 1 if first_frame_only else self.max_frames)
        frames, selected = [], set(indices)
        for index, frame in enumerate(iio.imiter(**file)):
            if index in selected:
                frames.append(Image.fromarray(frame).convert("RGB"))
            if index >= indices[-1]:
                break
        if not frames:
            raise RowError(f"{name} has no frames")
        return Video(tuple(frames), metadata["fps"] * len(indices) / num_frames)


def check_length(name: str, num_frames: int, width: int, height: int, *, max_pixels: int) -> None:
    """Raises RowError if all frames of a video together have more than `max_pixels` pixels. All frames up to the last
    selected one have to be decoded."""
    if num_frames * width * height > max_pixels:
        raise RowError(
            f"{name} has {num_frames} frames of {width} x {height} pixels, more than {max_pixels} pixels together; "
            "shorten it, or make it smaller"
        )


def evenly_spaced(num_frames: int, max_frames: int) -> list[int]:
    """Returns the indices of at most `max_frames` of `num_frames` frames, evenly spaced, beginning with 0."""
    num_selected = min(num_frames, max_frames)
    return [index * num_frames // num_selected for index in range(num_selected)]

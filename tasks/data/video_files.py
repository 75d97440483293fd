"""Videos that a data file names or holds: animated GIF, WebP and PNG, and MP4, MOV and WebM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, BinaryIO

from PIL import Image

from mmrl.rollouts import Video
from mmrl.runtime.images import to_rgb
from mmrl.runtime.jsonl import RowError
from mmrl.tasks.data.bounds import MAX_ANIMATED, MAX_FILMED, MAX_FRAMES
from mmrl.tasks.data.image_files import ImageFiles

ANIMATED = ("GIF", "WEBP", "PNG")
GIF_FPS = 10.0  # of a file that does not say how long it shows a frame
STARTS = 12  # bytes that tell what a file is


@dataclass(frozen=True)
class VideoFiles:
    """Opens the videos that rows refer to, within the folder and the frame size of `image_files`; of each video at most
    `max_frames` are kept, evenly spaced, the first among them.

    Formats are recognised by a file's first bytes: a playlist, which would make the decoder open other files, is not a
    video.
    """

    image_files: ImageFiles = ImageFiles()
    max_frames: int = MAX_FRAMES

    def check(self, video: object) -> None:
        """Raises RowError for a video that can not be used, as far as its header tells."""
        what, file = self.image_files.file(video)
        with file:
            self._read(what, file, header=True)

    def decoded(self, video: object) -> Video:
        """Returns the frames in RGB. Raises RowError for a video that can not be used."""
        what, file = self.image_files.file(video)
        with file:
            return self._read(what, file, header=False)

    def _read(self, what: str, file: BinaryIO, *, header: bool) -> Video:
        first = file.read(STARTS)
        file.seek(0)
        try:
            if first[4:8] == b"ftyp" or first[:4] == b"\x1aE\xdf\xa3":
                return self._film(what, file.read(), ".mp4" if first[4:8] == b"ftyp" else ".webm", header)
            return self._animation(what, file, header)
        except RowError:
            raise
        except Image.UnidentifiedImageError:
            raise RowError(f"cannot read {what}: no MP4, MOV, WebM, {', '.join(ANIMATED)}") from None
        except Exception as error:  # any error of a decoder, for bytes that have not been checked
            raise RowError(f"cannot read {what}: {' '.join(str(error).split()) or type(error).__name__}") from None

    def _animation(self, what: str, file: BinaryIO, header: bool) -> Video:
        """Reads up to max_frames evenly spaced frames of an animated image, with the rate in frames a second that this
        makes. header: the first one only."""
        with Image.open(file, formats=ANIMATED) as opened:
            self.image_files.check_size(what, *opened.size)
            count = opened.n_frames  # type: ignore[attr-defined]  # all of ANIMATED have it
            check_length(what, count, *opened.size, most=MAX_ANIMATED)
            indices = evenly(count, 1 if header else self.max_frames)
            frames, shown = [], 0.0
            for index in indices:
                opened.seek(index)
                frames.append(to_rgb(opened))
                shown = float(opened.info.get("duration", 0))
        fps = 1000 / shown if shown > 0 else GIF_FPS
        return Video(tuple(frames), fps * len(indices) / count)

    def _film(self, what: str, data: bytes, extension: str, header: bool) -> Video:
        """Reads up to max_frames evenly spaced frames of a video by FFmpeg, with the rate in frames a second that this
        makes. header: the first one only."""
        import imageio.v3 as iio

        file: dict[str, Any] = {"uri": data, "plugin": "FFMPEG", "extension": extension}
        metadata = iio.immeta(**file)
        self.image_files.check_size(what, *metadata["size"])
        count = max(1, round(metadata["fps"] * metadata["duration"]))
        check_length(what, count, *metadata["size"], most=MAX_FILMED)
        indices = evenly(count, 1 if header else self.max_frames)
        frames, wanted = [], set(indices)
        for index, frame in enumerate(iio.imiter(**file)):
            if index in wanted:
                frames.append(Image.fromarray(frame).convert("RGB"))
            if index >= indices[-1]:
                break
        if not frames:
            raise RowError(f"{what} has no frames")
        return Video(tuple(frames), metadata["fps"] * len(indices) / count)


def check_length(what: str, count: int, width: int, height: int, *, most: int) -> None:
    """Raises RowError for a video whose frames have more than `most` pixels together: all before the last one that is
    kept have to be decoded."""
    if count * width * height > most:
        raise RowError(
            f"{what} has {count} frames of {width} x {height} pixels, more than {most} together; cut it, or shrink it"
        )


def evenly(count: int, most: int) -> list[int]:
    """Returns the indices of at most `most` of `count` frames, evenly spaced from the first on."""
    chosen = min(count, most)
    return [index * count // chosen for index in range(chosen)]

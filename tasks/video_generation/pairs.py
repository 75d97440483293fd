"""Preference pairs of videos from the user's files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from einops import rearrange
from torch import Tensor

from mmrl.errors import UserError
from mmrl.runtime.jsonl import RowError
from mmrl.tasks.data.image_files import ImageFiles
from mmrl.tasks.data.pairs import Pairs
from mmrl.tasks.data.video_files import VideoFiles


class VideoPairs(Pairs):
    """Preference pairs of videos, [frame, channel, height, width] each, from GIF, WebP, PNG, MP4, MOV or WebM files.

    grey: frames have one channel, else three. num_frames: evenly spaced frames that are read of each video.
    """

    media = "a video"

    def __init__(self, path: Path, *, grey: bool, num_frames: int, max_bad_share: float, field: str = "prompt") -> None:
        self.mode, self.num_frames = "L" if grey else "RGB", num_frames
        super().__init__(path, max_bad_share=max_bad_share, field=field)

    def read(self, path: Path, row: str) -> Tensor:
        """Returns the video of a file, [frame, channel, height, width] float32, 0 to 1. Raises UserError, which names
        `row`, if it cannot be read or is too short."""
        try:
            video = VideoFiles(ImageFiles(self.root), self.num_frames).decode(str(path))
        except RowError as error:
            raise UserError(f"{row}: {error}") from None
        if len(video.frames) < self.num_frames:
            raise UserError(
                f"{row}: {path} has {len(video.frames)} frames, fewer than task.data.frames={self.num_frames}; "
                "replace the video, or lower task.data.frames"
            )
        pixels = np.stack([np.asarray(frame.convert(self.mode), dtype=np.float32) / 255 for frame in video.frames])
        frames = torch.from_numpy(pixels)
        return frames[:, None] if self.mode == "L" else rearrange(frames, "f h w c -> f c h w").contiguous()

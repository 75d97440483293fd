"""The videos of samples as one batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mmrl.errors import UserError
from mmrl.rewards.types import video_of
from mmrl.rollouts import Sample


def stack_videos(samples: Sequence[Sample], size: tuple[int, ...] | None = None) -> Tensor:
    """Stacks the videos of samples: [sample, frame, channel, height, width] float32, 0 to 1 in gamut, not clamped.

    size: the expected shape of a video; None: the first video's shape. Raises UserError for a sample without a video,
    or with one of another shape.
    """
    videos = [video_of(sample).float() for sample in samples]
    size = size or tuple(videos[0].shape)
    for sample, video in zip(samples, videos, strict=True):
        if video.shape != size:
            raise UserError(
                f"the video of prompt {sample.prompt.id!r} has the shape {list(video.shape)}, expected {list(size)}"
            )
    return torch.stack(videos)

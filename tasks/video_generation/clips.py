"""Clips of samples as one batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mmrl.errors import UserError
from mmrl.rewards.types import clip
from mmrl.rollouts import Sample


def stack_clips(samples: Sequence[Sample], size: tuple[int, ...] | None = None) -> Tensor:
    """[sample, frame, channel, height, width] float32, 0 to 1 in gamut, not clamped.

    Raises UserError for a sample without a clip, and for one that has not the given size, or that of the first.
    """
    clips = [clip(sample).float() for sample in samples]
    size = size or tuple(clips[0].shape)
    for sample, one in zip(samples, clips, strict=True):
        if one.shape != size:
            raise UserError(f"the clip of prompt {sample.prompt.id!r} is {list(one.shape)}, expected {list(size)}")
    return torch.stack(clips)

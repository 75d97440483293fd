"""The images of samples as one batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mmrl.errors import UserError
from mmrl.rewards.types import image_of
from mmrl.rollouts import Sample


def stack_images(samples: Sequence[Sample], size: tuple[int, ...] | None = None) -> Tensor:
    """Stacks the images of samples: [sample, channel, height, width] float32, 0 to 1 in gamut, not clamped.

    size: the expected shape of an image; None: the first image's shape. Raises UserError for a sample without an image,
    or with one of another shape.
    """
    images = [image_of(sample).float() for sample in samples]
    size = size or tuple(images[0].shape)
    for sample, image in zip(samples, images, strict=True):
        if image.shape != size:
            raise UserError(
                f"the image of prompt {sample.prompt.id!r} has the shape {list(image.shape)}, expected {list(size)}"
            )
    return torch.stack(images)

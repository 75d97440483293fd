"""Likeness of an edited image to its source, outside the region that the edit may change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor

from mmrl.errors import UserError
from mmrl.rewards.types import Reward, image_of
from mmrl.rollouts import Sample

Measure = Literal["l1", "psnr", "ssim"]
HIGHEST_DB = 60.0  # of a PSNR: that of equal images is infinite


def source_similarity(*, measure: Measure = "l1") -> Reward:
    """Likeness of the image to the prompt's first image, the source, which is scaled to its size.

    measure      l1: 1 - mean |image - source|; psnr: -10 log10 of the mean squared difference, in dB, at most 60;
                 ssim: the mean of the structural similarity (Wang et al. 2004), in Gaussian windows of 11 pixels with
                 a spread of 1.5

    What may change is left out: prompt.metadata["mask"], an image or its file whose white pixels may change, or
    prompt.metadata["box"], [left, top, right, bottom] in pixels of the source. Without either all pixels count. None
    for an image that holds NaN or inf, and where nothing is left to compare.
    """
    similarity = compare(measure)

    def reward(sample: Sample) -> float | None:
        image = image_of(sample).float().cpu()
        if not image.isfinite().all():
            return None
        source = source_of(sample, image.shape)
        weight = weight_of(sample, image.shape[1:])
        return float(similarity(image.clamp(0, 1), source, weight)) if weight.any() else None

    return reward


def compare(measure: Measure) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Returns the function of two images [channel, height, width] of 0 to 1, and weights [height, width] of pixels,
    that measures their likeness. Raises ValueError for an unknown measure."""
    if measure not in _MEASURES:
        raise ValueError(f"measure must be l1, psnr or ssim, not {measure!r}")
    return _MEASURES[measure]


def source_of(sample: Sample, shape: Sequence[int]) -> Tensor:
    """Returns the prompt's first image as [channel, height, width] of this shape, 0 to 1. Raises UserError where there
    is none."""
    if not sample.prompt.images:
        raise UserError(f"prompt {sample.prompt.id!r} has no image that was edited, which source_similarity compares")
    image = sample.prompt.images[0].convert("RGB" if shape[0] == 3 else "L")
    size = (shape[2], shape[1])
    return pil_to_tensor(image if image.size == size else image.resize(size, Image.Resampling.BICUBIC)) / 255


def weight_of(sample: Sample, size: Sequence[int]) -> Tensor:
    """Returns 1 where pixels must stay and 0 where they may change, [height, width]. Raises UserError for a mask that
    can not be read and a box that is none."""
    metadata, (height, width) = sample.prompt.metadata, size
    if (mask := metadata.get("mask")) is not None:
        inside = pil_to_tensor(_mask(mask, sample).resize((width, height), Image.Resampling.NEAREST))[0] > 127
    elif (box := metadata.get("box")) is not None:
        inside = _box(box, sample, height, width)
    else:
        return torch.ones(height, width)
    return 1 - inside.float()


def _mask(mask: object, sample: Sample) -> Image.Image:
    """Returns the mask of an edit in grey, from an image or a path. Raises UserError."""
    if isinstance(mask, Image.Image):
        return mask.convert("L")
    try:
        return Image.open(Path(str(mask))).convert("L")
    except OSError as error:
        raise UserError(f"prompt {sample.prompt.id!r}: its mask can not be read: {error}") from None


def _box(box: object, sample: Sample, height: int, width: int) -> Tensor:
    """Returns the pixels inside a box of the source, [height, width] bool."""
    if not isinstance(box, (list, tuple)) or len(box) != 4 or not box[0] < box[2] or not box[1] < box[3]:
        raise UserError(f"prompt {sample.prompt.id!r}: its box is {box!r}, not [left, top, right, bottom]")
    across, down = (side / of for side, of in zip((width, height), sample.prompt.images[0].size, strict=True))
    left, top, right, bottom = box[0] * across, box[1] * down, box[2] * across, box[3] * down
    x, y = torch.arange(width) + 0.5, torch.arange(height)[:, None] + 0.5
    return (x > left) & (x < right) & (y > top) & (y < bottom)


def _mean(values: Tensor, weight: Tensor) -> Tensor:
    """Averages [channel, height, width] over channels and the pixels that count."""
    values = values.mean(0)
    return (values * weight).sum() / weight.sum().clamp(min=1e-9)


def _l1(image: Tensor, source: Tensor, weight: Tensor) -> Tensor:
    return 1 - _mean((image - source).abs(), weight)


def _psnr(image: Tensor, source: Tensor, weight: Tensor) -> Tensor:
    return (-10 * _mean((image - source).square(), weight).log10()).clamp(max=HIGHEST_DB)


def _ssim(image: Tensor, source: Tensor, weight: Tensor) -> Tensor:
    """Computes SSIM (11 x 11 Gaussian window, sigma 1.5) of images [channel, height, width] in 0..1, averaged with
    weights [height, width]."""
    image, source = image.double(), source.double()  # differences of squares are small
    offset = torch.arange(11).double() - 5
    line = (-(offset**2) / (2 * 1.5**2)).exp()
    window = (line[:, None] * line / line.sum() ** 2)[None, None]

    def blurred(values: Tensor) -> Tensor:
        return F.conv2d(F.pad(values[:, None], (5, 5, 5, 5), mode="replicate"), window)[:, 0]

    a, b = blurred(image), blurred(source)
    spread_a, spread_b = blurred(image.square()) - a.square(), blurred(source.square()) - b.square()
    together = blurred(image * source) - a * b
    one, two = 0.01**2, 0.03**2
    similarity = (2 * a * b + one) * (2 * together + two) / ((a**2 + b**2 + one) * (spread_a + spread_b + two))
    return _mean(similarity, weight)


_MEASURES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"l1": _l1, "psnr": _psnr, "ssim": _ssim}

"""Similarity of an edited image to its source, outside the region that the edit may change."""

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
MAX_DB = 60.0  # largest PSNR, in dB; it would be infinite for equal images


def source_similarity(*, measure: Measure = "l1") -> Reward:
    """Builds a reward: the similarity of the image to the prompt's first image, the source, scaled to the image's size.

    measure: "l1", 1 - mean |image - source|. "psnr", -10 log10 of the mean squared difference, in dB, at most 60.
    "ssim", the mean structural similarity (Wang et al. 2004) in Gaussian windows of 11 pixels with a sigma of 1.5.

    Pixels that the edit may change are left out: the white pixels of prompt.metadata["mask"], an image or its file, or
    those inside prompt.metadata["box"], [left, top, right, bottom] in pixels of the source. Without either, all pixels
    count. None for an image with NaN or inf, and if no pixel is left.
    """
    similarity = compare(measure)

    def reward(sample: Sample) -> float | None:
        """Returns the similarity of the image to its source where it must stay; None for NaN or inf, and if no
        pixel must stay."""
        image = image_of(sample).float().cpu()
        if not image.isfinite().all():
            return None
        source = source_image(sample, image.shape)
        weights = pixel_weights(sample, image.shape[1:])
        return float(similarity(image.clamp(0, 1), source, weights)) if weights.any() else None

    return reward


def compare(measure: Measure) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Returns the similarity function f(image, source, weights) of a measure, for images [channel, height, width] in
    0..1 and weights of pixels [height, width]. Raises ValueError for an unknown measure."""
    if measure not in _MEASURES:
        raise ValueError(f"measure must be l1, psnr or ssim, not {measure!r}")
    return _MEASURES[measure]


def source_image(sample: Sample, shape: Sequence[int]) -> Tensor:
    """Returns the prompt's first image, scaled to `shape` [channel, height, width], in 0..1. Raises UserError if there
    is none."""
    if not sample.prompt.images:
        raise UserError(
            f"prompt {sample.prompt.id!r} has no image for source_similarity to compare with; add one to its row"
        )
    image = sample.prompt.images[0].convert("RGB" if shape[0] == 3 else "L")
    size = (shape[2], shape[1])
    return pil_to_tensor(image if image.size == size else image.resize(size, Image.Resampling.BICUBIC)) / 255


def pixel_weights(sample: Sample, size: Sequence[int]) -> Tensor:
    """Returns the weights of pixels, fp32 [height, width]: 1 for pixels that must stay, 0 for pixels that may change.
    Raises UserError for a mask or box that cannot be read."""
    metadata, (height, width) = sample.prompt.metadata, size
    if (mask := metadata.get("mask")) is not None:
        inside = pil_to_tensor(_mask(mask, sample).resize((width, height), Image.Resampling.NEAREST))[0] > 127
    elif (box := metadata.get("box")) is not None:
        inside = _box(box, sample, height, width)
    else:
        return torch.ones(height, width)
    return 1 - inside.float()


def _mask(mask: object, sample: Sample) -> Image.Image:
    """Returns the mask of an edit as a grey image, from an image or a path. Raises UserError if it cannot be read."""
    if isinstance(mask, Image.Image):
        return mask.convert("L")
    try:
        return Image.open(Path(str(mask))).convert("L")
    except OSError as error:
        raise UserError(f"prompt {sample.prompt.id!r}: its mask cannot be read: {error}") from None


def _box(box: object, sample: Sample, height: int, width: int) -> Tensor:
    """Returns which pixels lie inside a box of the source, bool [height, width]. Raises UserError if it is no box."""
    if not isinstance(box, (list, tuple)) or len(box) != 4 or not box[0] < box[2] or not box[1] < box[3]:
        raise UserError(
            f"prompt {sample.prompt.id!r}: its box is {box!r}, not [left, top, right, bottom] with left < right and "
            "top < bottom"
        )
    source_width, source_height = sample.prompt.images[0].size
    scale_x, scale_y = width / source_width, height / source_height
    left, top, right, bottom = box[0] * scale_x, box[1] * scale_y, box[2] * scale_x, box[3] * scale_y
    x, y = torch.arange(width) + 0.5, torch.arange(height)[:, None] + 0.5  # centres of pixels
    return (x > left) & (x < right) & (y > top) & (y < bottom)


def _mean(values: Tensor, weights: Tensor) -> Tensor:
    """Averages values [channel, height, width] over channels, and over pixels with `weights` [height, width]."""
    values = values.mean(0)
    return (values * weights).sum() / weights.sum().clamp(min=1e-9)


def _l1(image: Tensor, source: Tensor, weights: Tensor) -> Tensor:
    return 1 - _mean((image - source).abs(), weights)


def _psnr(image: Tensor, source: Tensor, weights: Tensor) -> Tensor:
    return (-10 * _mean((image - source).square(), weights).log10()).clamp(max=MAX_DB)


def _ssim(image: Tensor, source: Tensor, weights: Tensor) -> Tensor:
    """Returns the SSIM (11 x 11 Gaussian window, sigma 1.5) of images [channel, height, width] in 0..1, averaged with
    weights [height, width]."""
    image, source = image.double(), source.double()  # float64, since differences of squares are small
    offset = torch.arange(11).double() - 5  # from the middle of the window
    line = (-(offset**2) / (2 * 1.5**2)).exp()
    window = (line[:, None] * line / line.sum() ** 2)[None, None]

    def blurred(values: Tensor) -> Tensor:
        return F.conv2d(F.pad(values[:, None], (5, 5, 5, 5), mode="replicate"), window)[:, 0]

    mean_a, mean_b = blurred(image), blurred(source)
    variance_a, variance_b = blurred(image.square()) - mean_a.square(), blurred(source.square()) - mean_b.square()
    covariance = blurred(image * source) - mean_a * mean_b
    c1, c2 = 0.01**2, 0.03**2  # constants of Wang et al. for pixels in 0..1
    similarity = (
        (2 * mean_a * mean_b + c1)
        * (2 * covariance + c2)
        / ((mean_a**2 + mean_b**2 + c1) * (variance_a + variance_b + c2))
    )
    return _mean(similarity, weights)


_MEASURES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"l1": _l1, "psnr": _psnr, "ssim": _ssim}

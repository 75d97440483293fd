"""Differentiable preprocessing of a CLIP model in torch: what its image processor does to an 8-bit image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BICUBIC = 3  # number of the filter in PIL


@dataclass(frozen=True)
class Preprocessing:
    """Scales the shorter side to `edge` pixels, crops the centre, and normalises. crop: height and width. mean, std: of
    each channel."""

    edge: int
    crop: tuple[int, int]
    mean: Sequence[float]
    std: Sequence[float]

    def __call__(self, images: Tensor) -> Tensor:
        """Converts images [image, channel, height, width] in 0..1 to inputs [image, 3, height, width].

        Values are those of 8-bit images; their rounding has the gradient 1. Pixels outside 0..1 have the gradient of
        the border.
        """
        x = images.float()
        x = x + ((x.clamp(0, 1) * 255).round() / 255 - x).detach()
        x = x.expand(-1, 3, -1, -1) if x.shape[1] == 1 else x
        height, width = x.shape[-2:]
        short = min(height, width)
        size = (int(self.edge * height / short), int(self.edge * width / short))
        if size != (height, width):
            x = F.interpolate(x, size=size, mode="bicubic", antialias=True, align_corners=False)
            x = x + (x.clamp(0, 1) - x).detach()  # a resized 8-bit image has no values outside 0..1
        top, left = (size[0] - self.crop[0]) // 2, (size[1] - self.crop[1]) // 2
        x = x[..., top : top + self.crop[0], left : left + self.crop[1]]
        mean, std = (torch.tensor(values, device=x.device)[:, None, None] for values in (self.mean, self.std))
        return (x - mean) / std


def from_transformers(processor: Any) -> Preprocessing:
    """Returns the preprocessing of an image processor of transformers. Raises ValueError if the processor does anything
    else."""
    edge, crop = processor.size.get("shortest_edge"), processor.crop_size
    does_all = processor.do_resize and processor.do_center_crop and processor.do_normalize and processor.do_rescale
    if edge is None or not does_all or int(processor.resample) != BICUBIC or edge < max(crop["height"], crop["width"]):
        raise ValueError(
            f"the image processor {type(processor).__name__} does not scale by the shorter side (bicubic), crop and "
            "normalise, so there is no gradient through it; choose another model"
        )
    return Preprocessing(edge, (crop["height"], crop["width"]), tuple(processor.image_mean), tuple(processor.image_std))


def from_open_clip(settings: Mapping[str, Any]) -> Preprocessing:
    """Returns the preprocessing of an open_clip model, from its `preprocess_cfg`. Raises ValueError if it does anything
    else."""
    if (settings["resize_mode"], settings["interpolation"]) != ("shortest", "bicubic"):
        raise ValueError(
            f"open_clip's preprocessing resizes by {settings['resize_mode']}, {settings['interpolation']}, not by the "
            "shorter side (bicubic), so there is no gradient through it; choose another model"
        )
    size = settings["size"]
    height, width = (size, size) if isinstance(size, int) else size
    return Preprocessing(min(height, width), (height, width), tuple(settings["mean"]), tuple(settings["std"]))

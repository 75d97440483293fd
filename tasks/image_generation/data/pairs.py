"""Preference pairs of images from the user's files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from mmrl.errors import UserError
from mmrl.runtime.images import to_rgb
from mmrl.tasks.data.pairs import Pairs

FORMATS = ("PNG", "JPEG", "WEBP")


class ImagePairs(Pairs):
    """Preference pairs of images, [channel, height, width] each. grey: images have one channel, else three."""

    media = "an image"

    def __init__(self, path: Path, *, grey: bool, max_bad_share: float, field: str = "prompt") -> None:
        self.mode = "L" if grey else "RGB"
        super().__init__(path, max_bad_share=max_bad_share, field=field)

    def read(self, path: Path, row: str) -> Tensor:
        """Returns the image of a file, [channel, height, width] float32, 0 to 1. Raises UserError, which names `row`,
        if it cannot be read."""
        try:
            with Image.open(path, formats=FORMATS) as opened:
                pixels = np.asarray(to_rgb(opened).convert(self.mode), dtype=np.float32) / 255
        except (OSError, ValueError, UnidentifiedImageError, Image.DecompressionBombError) as error:
            raise UserError(f"{row}: cannot read the image {path}: {error}") from None
        return torch.from_numpy(pixels).reshape(*pixels.shape[:2], -1).permute(2, 0, 1)

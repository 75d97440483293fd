"""Pairs of images from the user's files."""

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
    """Pairs of images, [channel, height, width] each."""

    kind = "an image"

    def __init__(self, path: Path, *, grey: bool, max_bad_share: float, field: str = "prompt") -> None:
        """grey: images become one channel; else three."""
        self.mode = "L" if grey else "RGB"
        super().__init__(path, max_bad_share=max_bad_share, field=field)

    def read(self, path: Path, row: str) -> Tensor:
        try:
            with Image.open(path, formats=FORMATS) as opened:
                pixels = np.asarray(to_rgb(opened).convert(self.mode), dtype=np.float32) / 255
        except (OSError, ValueError, UnidentifiedImageError, Image.DecompressionBombError) as error:
            raise UserError(f"{row}: {path} is not an image that can be read: {error}") from None
        return torch.from_numpy(pixels).reshape(*pixels.shape[:2], -1).permute(2, 0, 1)

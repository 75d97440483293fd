"""Pairs of images from the user's files: which of two was preferred for a prompt."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from mmrl.errors import UserError
from mmrl.rollouts import Prompt
from mmrl.tasks.image_generation.data import prompts

FORMATS = ("PNG", "JPEG", "WEBP")


class PairSource:
    """Rows of a `.jsonl` file: `prompt`, and `chosen` and `rejected`, paths of images below the file's folder.

    Metadata: `target` and `rejected`, [channel, height, width] float32, 0 to 1.

    Raises ValueError for a file without such rows; an image that can not be used raises UserError when it is asked
    for.
    """

    def __init__(self, path: Path, *, grey: bool, max_bad_share: float) -> None:
        """grey: images become one channel; else three."""
        if path.suffix != ".jsonl":
            raise ValueError(f"{path}: pairs are a .jsonl file with prompt, chosen and rejected")
        self.root, self.mode = path.parent.resolve(), "L" if grey else "RGB"
        self.prompts = prompts.load(path, max_bad_share=max_bad_share)
        for prompt in self.prompts:
            for key in ("chosen", "rejected"):
                self._image_path(prompt, key)

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: int) -> Prompt:
        prompt = self.prompts[index]
        target, rejected = (self._image(prompt, key) for key in ("chosen", "rejected"))
        if target.shape != rejected.shape:
            raise UserError(f"row {prompt.id}: chosen is {list(target.shape)}, rejected {list(rejected.shape)}")
        return replace(prompt, metadata=prompt.metadata | {"target": target, "rejected": rejected})

    def _image_path(self, prompt: Prompt, key: str) -> Path:
        """Returns the path of an image. Raises ValueError where the row names no file, or one outside of the root."""
        named = prompt.metadata.get(key)
        if not isinstance(named, str):
            raise ValueError(f"row {prompt.id}: key {key!r} must be the path of an image")
        path = (self.root / named).resolve()
        if not path.is_relative_to(self.root):
            raise ValueError(f"row {prompt.id}: {named!r} leads out of {self.root}")
        if not path.is_file():
            raise ValueError(f"row {prompt.id}: there is no file {path}")
        return path

    def _image(self, prompt: Prompt, key: str) -> Tensor:
        path = self._image_path(prompt, key)
        try:
            with Image.open(path, formats=FORMATS) as opened:
                pixels = np.asarray(opened.convert(self.mode), dtype=np.float32) / 255
        except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
            raise UserError(f"row {prompt.id}: {path} is no image that can be read: {error}") from None
        return torch.from_numpy(pixels).reshape(*pixels.shape[:2], -1).permute(2, 0, 1)

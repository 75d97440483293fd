"""A codebook of image patches: images as rows of tokens. It is saved beside the model that writes the tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from einops import rearrange
from safetensors.torch import load_file, save_file
from torch import Tensor

from mmrl.errors import UserError
from mmrl.runtime.installation import extra_command

NAME = "codebook"


@dataclass(frozen=True)
class Codebook:
    """Maps image patches to tokens: code c is the patch `patches[c]` and the token `first + c` of the model. An image
    is read row by row."""

    patches: Tensor  # [code, channel, height, width] fp32, 0 to 1
    rows: int  # of patches in an image
    columns: int
    first: int  # the token of code 0

    @property
    def tokens_per_image(self) -> int:
        return self.rows * self.columns

    @property
    def size(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        channels, height, width = self.patches.shape[1:]
        return channels, self.rows * height, self.columns * width

    def outside(self, vocabulary: int) -> Tensor:
        """Returns the tokens of a model that are not codes, [n] int64. vocabulary: how many tokens it has. Raises
        UserError where codes lie beyond them."""
        last = self.first + len(self.patches)
        if last > vocabulary:
            raise UserError(
                f"the codebook's {len(self.patches)} codes are tokens {self.first} to {last - 1}, but the model beside "
                f"it has {vocabulary} tokens; take the codebook that it was trained with"
            )
        return torch.cat([torch.arange(self.first), torch.arange(last, vocabulary)])

    def tokens(self, images: Tensor) -> Tensor:
        """Returns the nearest code's token of each patch: [image, channel, height, width] in [0, 1] -> [image,
        position] int64. Raises UserError for images of another size."""
        if tuple(images.shape[1:]) != self.size:
            raise UserError(f"images of {list(images.shape[1:])} do not fit a codebook for {list(self.size)}")
        shape = {"r": self.rows, "c": self.columns}
        cut = rearrange(images.float(), "n k (r h) (c w) -> (n r c) (k h w)", **shape)
        nearest = torch.cdist(cut, self.patches.flatten(1)).argmin(1)
        return self.first + nearest.view(len(images), self.tokens_per_image)

    def images(self, tokens: Tensor) -> Tensor:
        """Returns images of tokens: [image, position] -> [image, channel, height, width] fp32."""
        shape = {"r": self.rows, "c": self.columns}
        return rearrange(self.patches[tokens - self.first], "n (r c) k h w -> n k (r h) (c w)", **shape)


def write(folder: str | Path, codebook: Codebook) -> None:
    save_file({"patches": codebook.patches.contiguous()}, Path(folder) / f"{NAME}.safetensors")
    numbers = {"rows": codebook.rows, "columns": codebook.columns, "first": codebook.first}
    (Path(folder) / f"{NAME}.json").write_text(json.dumps(numbers, indent=2))


def read(folder: str | Path) -> Codebook | None:
    """Returns the codebook in a model's folder, or None where there is none. Raises UserError for one that can not be
    read."""
    weights = Path(folder) / f"{NAME}.safetensors"
    if not weights.is_file():
        return None
    try:
        numbers = json.loads((Path(folder) / f"{NAME}.json").read_text())
        return Codebook(load_file(weights)["patches"], numbers["rows"], numbers["columns"], numbers["first"])
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"the codebook in {folder} can not be read: {error}") from None


def fit(images: Tensor, count: int, patch: int, first: int, seed: int = 0) -> Codebook:
    """Fits `count` square patches of `patch` pixels to images [image, channel, height, width] by k-means. Raises
    UserError where scikit-learn is missing."""
    try:
        from sklearn.cluster import KMeans
    except ModuleNotFoundError:
        raise UserError(f"making a codebook needs scikit-learn: {extra_command('codebook')}") from None

    cut = rearrange(images, "n k (r h) (c w) -> (n r c) (k h w)", h=patch, w=patch)
    kmeans = KMeans(count, n_init=1, random_state=seed).fit(cut.numpy())
    patches = torch.from_numpy(kmeans.cluster_centers_).float().view(count, images.shape[1], patch, patch)
    return Codebook(patches, images.shape[2] // patch, images.shape[3] // patch, first)

"""A codebook of image patches (a VQ tokenizer): it encodes images as tokens and decodes them. It is saved in the folder
of the model that generates the tokens."""

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
    """Maps image patches to tokens: code c stands for the patch `patches[c]` and is the token id `first + c` of the
    model. The patches of an image are ordered row by row."""

    patches: Tensor  # [code, channel, height, width] fp32, 0 to 1
    rows: int  # number of rows of patches in an image
    columns: int  # number of columns of patches in an image
    first: int  # the token id of code 0

    @property
    def tokens_per_image(self) -> int:
        """The number of patches in an image."""
        return self.rows * self.columns

    @property
    def size(self) -> tuple[int, int, int]:
        """Channels, height and width of an image, in pixels."""
        channels, height, width = self.patches.shape[1:]
        return channels, self.rows * height, self.columns * width

    def non_code_tokens(self, vocabulary: int) -> Tensor:
        """Returns the token ids of a model that are not codes of this codebook, [n] int64. vocabulary: the model's
        number of tokens. Raises UserError if a code's token id is not below it."""
        last = self.first + len(self.patches)
        if last > vocabulary:
            raise UserError(
                f"the codebook's {len(self.patches)} codes are tokens {self.first} to {last - 1}, but the model in its "
                f"folder has {vocabulary} tokens; use the codebook that the model was trained with"
            )
        return torch.cat([torch.arange(self.first), torch.arange(last, vocabulary)])

    def encode(self, images: Tensor) -> Tensor:
        """Encodes images [image, channel, height, width] in [0, 1] as tokens [image, position] int64: each patch
        becomes the code of the nearest patch. Raises UserError for images of another size."""
        if tuple(images.shape[1:]) != self.size:
            raise UserError(
                f"images of {list(images.shape[1:])} (channels, height, width) do not fit the model's codebook, which "
                f"is for {list(self.size)}; resize them"
            )
        shape = {"r": self.rows, "c": self.columns}
        patches = rearrange(images.float(), "n k (r h) (c w) -> (n r c) (k h w)", **shape)
        nearest = torch.cdist(patches, self.patches.flatten(1)).argmin(1)
        return self.first + nearest.view(len(images), self.tokens_per_image)

    def decode(self, tokens: Tensor) -> Tensor:
        """Decodes tokens [image, position] to images [image, channel, height, width] fp32."""
        shape = {"r": self.rows, "c": self.columns}
        return rearrange(self.patches[tokens - self.first], "n (r c) k h w -> n k (r h) (c w)", **shape)


def write(folder: str | Path, codebook: Codebook) -> None:
    """Saves a codebook in a model's folder, as codebook.safetensors and codebook.json."""
    save_file({"patches": codebook.patches.contiguous()}, Path(folder) / f"{NAME}.safetensors")
    config = {"rows": codebook.rows, "columns": codebook.columns, "first": codebook.first}
    (Path(folder) / f"{NAME}.json").write_text(json.dumps(config, indent=2))


def read(folder: str | Path) -> Codebook | None:
    """Returns the codebook in a model's folder, or None if there is none. Raises UserError if it cannot be read."""
    weights = Path(folder) / f"{NAME}.safetensors"
    if not weights.is_file():
        return None
    try:
        config = json.loads((Path(folder) / f"{NAME}.json").read_text())
        return Codebook(load_file(weights)["patches"], config["rows"], config["columns"], config["first"])
    except (OSError, ValueError, KeyError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else error
        raise UserError(f"model.path={folder}: its {NAME}.json or .safetensors cannot be read: {reason}") from None


def fit(images: Tensor, num_codes: int, patch_size: int, first: int, seed: int = 0) -> Codebook:
    """Fits a codebook to images [image, channel, height, width] by k-means. patch_size: side of a square patch in
    pixels; first: the token id of code 0. Raises UserError if scikit-learn is not installed."""
    try:
        from sklearn.cluster import KMeans
    except ModuleNotFoundError:
        raise UserError(f"making a codebook needs scikit-learn; install it with: {extra_command('codebook')}") from None

    channels, height, width = images.shape[1:]
    vectors = rearrange(images, "n k (r h) (c w) -> (n r c) (k h w)", h=patch_size, w=patch_size)
    kmeans = KMeans(num_codes, n_init=1, random_state=seed).fit(vectors.numpy())
    patches = torch.from_numpy(kmeans.cluster_centers_).float().view(num_codes, channels, patch_size, patch_size)
    return Codebook(patches, height // patch_size, width // patch_size, first)

"""What the diffusion policy asks of a family of models (Stable Diffusion 3, FLUX, Wan, ..., or a small network)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from PIL import Image
from torch import Tensor, nn

from mmrl.policies.models import NetworkCall
from mmrl.rollouts import Prompt
from mmrl.samplers.settings import Space
from mmrl.samplers.sigmas import Grid

Shape = tuple[int, ...]  # of a latent
Resolution = int | tuple[int, int] | None  # pixels: the side of a square, height and width, or the model's own
# What the encoders say of one prompt; no batch dimension, on the network's device. "source" are the latents of the
# image that is edited, where there is one.
Condition = dict[str, Tensor]


@dataclass(frozen=True)
class ConditionInputs:
    """All that a condition depends on: the words of a prompt and its images, told apart by their content."""

    text: str
    images: tuple[Image.Image, ...] = field(default=(), compare=False)
    digest: str = ""  # of the images

    @staticmethod
    def of(prompt: Prompt) -> ConditionInputs:
        """Of a prompt; its images are read once."""
        return ConditionInputs(prompt.text, prompt.images, _digest(prompt.images) if prompt.images else "")

    def saying(self, text: str) -> ConditionInputs:
        """The same images with other words."""
        return replace(self, text=text)


def _digest(images: Sequence[Image.Image]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for image in images:
        digest.update(f"{image.mode} {image.size}".encode())
        digest.update(image.tobytes())
    return digest.hexdigest()


class Family(Protocol):
    """One loaded model: how its prompts are encoded, its network called and its latents decoded.

    Latents are always [channel, height, width] an image and [channel, frame, height, width] a clip, fp32, however the
    network packs them. `space` says what the network predicts: "velocity" the velocity noise - data at x = (1 - sigma)
    data + sigma noise, "noise" the noise at x = sqrt(1 - sigma^2) data + sigma noise.
    """

    module: nn.Module  # what is trained, and what the engine wraps

    @property
    def space(self) -> Space: ...

    def latent_shape(self, resolution: Resolution, frames: int | None = None) -> Shape:
        """Of an image of `resolution` pixels, or of a clip of so many frames; None: the model's own. Raises UserError
        for what the VAE or the patches can not take."""
        ...

    def grid(self, steps: int, shape: Shape) -> Grid:
        """The noise levels of a chain of `steps` steps over latents of `shape`."""
        ...

    def levels(self, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """Noise levels for training without a chain: uniform draws in (0, 1) [n] -> (sigma [n], time [n])."""
        ...

    def encode(self, asked: Sequence[ConditionInputs], shape: Shape = ()) -> list[Condition]:
        """One condition each, for latents of `shape`; those that visit the device are on it only while this runs."""
        ...

    def cut(self, text: str) -> int:
        """How many tokens of a text the encoders leave out because of their limit."""
        ...

    def predict(
        self, model: NetworkCall, x: Tensor, time: Tensor, conditions: Sequence[Condition], guidance: float | None
    ) -> Tensor:
        """Velocity (or noise) like x, fp32, of latents x [n, ...] at times [n].

        `model` is `module` or the engine around it. conditions: one a row; rows may share one, which is then put on the
        device and batched once. `guidance` is the embedded scale of a guidance-distilled model; others ignore it.
        """
        ...

    def decode(self, latents: Tensor) -> Tensor:
        """Latents [n, ...] -> pixels [n, 3 or 1, height, width], or [n, frame, 3 or 1, height, width] of clips; 0 to 1
        in gamut, not clamped."""
        ...

    def decode_with_gradient(self, latents: Tensor) -> Tensor:
        """`decode` with the gradient by the latents. What decodes stays on the device, for the backward pass."""
        ...

    def to_latents(self, pixels: Tensor) -> Tensor:
        """The inverse of `decode`, for demonstrations."""
        ...

    def save(self, folder: Path, state: dict[str, Tensor]) -> None:
        """Write the trained weights (of `module`) in the library's own format."""
        ...

"""The interface between the diffusion policy and a family of models (Stable Diffusion 3, FLUX, Wan, a small
network)."""

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
# The embeddings of one prompt by name, without batch dimension, on the network's device. "source" holds the latents of
# the image that is edited, where there is one.
Condition = dict[str, Tensor]


@dataclass(frozen=True)
class ConditionInputs:
    """All that a condition depends on: a prompt's text and its images, which compare by their content."""

    text: str
    images: tuple[Image.Image, ...] = field(default=(), compare=False)
    digest: str = ""  # of the images

    @staticmethod
    def of(prompt: Prompt) -> ConditionInputs:
        """Returns the inputs of a prompt, reading its images once."""
        return ConditionInputs(prompt.text, prompt.images, _digest(prompt.images) if prompt.images else "")

    def with_text(self, text: str) -> ConditionInputs:
        """Returns the same images with another text."""
        return replace(self, text=text)


@dataclass(frozen=True)
class Remarks:
    """Notes on a model for the user. facts: how it differs from its own library's call, a line each;
    held_guidance: how a model distilled from a guided one has its guidance, None for one that has none."""

    facts: tuple[str, ...] = ()
    held_guidance: str | None = None


def _digest(images: Sequence[Image.Image]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for image in images:
        digest.update(f"{image.mode} {image.size}".encode())
        digest.update(image.tobytes())
    return digest.hexdigest()


class Family(Protocol):
    """One loaded model: how its prompts are encoded, its network called and its latents decoded.

    Latents are always [channel, height, width] an image and [channel, frame, height, width] a video, fp32, however the
    network packs them. `space` says what the network predicts: "velocity" the velocity noise - data at x = (1 - sigma)
    data + sigma noise, "noise" the noise at x = sqrt(1 - sigma^2) data + sigma noise.
    """

    module: nn.Module  # what is trained, and what the engine wraps

    @property
    def space(self) -> Space: ...

    @property
    def norm_patch(self) -> int | None:
        """Returns the side of patches of latents whose guided prediction gets the conditional one's norm; None: it
        has its own."""
        ...

    @property
    def remarks(self) -> Remarks: ...

    def latent_shape(self, resolution: Resolution, frames: int | None = None) -> Shape:
        """Returns the shape of one image's latents at `resolution` pixels, or of a video's of `frames` frames; None:
        the model's default. Raises UserError for sizes that the VAE or the patches can not take."""
        ...

    def grid(self, steps: int, shape: Shape) -> Grid:
        """Returns the noise levels of a chain of `steps` steps over latents of `shape`."""
        ...

    def levels(self, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """Maps uniform draws in (0, 1) [n] to noise levels for training without a chain: (sigma [n], time [n])."""
        ...

    def encode(self, inputs: Sequence[ConditionInputs], shape: Shape = ()) -> list[Condition]:
        """Returns one condition per input, for latents of `shape`. Encoders are on the device only while this runs."""
        ...

    def truncated_tokens(self, text: str) -> int:
        """Returns the number of tokens of a string beyond the encoders' limit, which are not read."""
        ...

    def predict(
        self, model: NetworkCall, x: Tensor, time: Tensor, conditions: Sequence[Condition], guidance: float | None
    ) -> Tensor:
        """Predicts the velocity (or noise) of latents x [n, ...] at times [n]; like x, fp32.

        `model` is `module` or the engine around it. conditions: one a row; rows may share one, which is then put on the
        device and batched once. `guidance` is the embedded scale of a guidance-distilled model; others ignore it.
        """
        ...

    def decode(self, latents: Tensor) -> Tensor:
        """Decodes latents [n, ...] to pixels [n, 3 or 1, height, width], of videos [n, frame, 3 or 1, height, width]; 0
        to 1 in gamut, not clamped."""
        ...

    def decode_with_gradient(self, latents: Tensor) -> Tensor:
        """Decodes with a gradient to the latents. The decoder stays on the device, for the backward pass."""
        ...

    def to_latents(self, pixels: Tensor) -> Tensor:
        """Encodes pixels, the inverse of `decode`, for demonstrations."""
        ...

    def save(self, folder: Path, state: dict[str, Tensor]) -> None:
        """Writes the trained weights (of `module`) in the library's own format."""
        ...

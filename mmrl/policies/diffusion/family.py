"""The interface between the diffusion policy and a family of models (Stable Diffusion 3, FLUX, Wan, a small
network of mmrl's own)."""

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

Shape = tuple[int, ...]  # of the latents of one image or video
Resolution = int | tuple[int, int] | None  # pixels: the side of a square, height and width, or the model's own
# The embeddings of one prompt by name, without batch dimension, on the network's device. "source" holds the latents of
# the image that is edited, where there is one.
Condition = dict[str, Tensor]


@dataclass(frozen=True)
class ConditionInputs:
    """Inputs of the condition of a prompt: its text and its images. Equal if text and image content are."""

    text: str
    images: tuple[Image.Image, ...] = field(default=(), compare=False)
    digest: str = ""  # a hash of the images

    @staticmethod
    def from_prompt(prompt: Prompt) -> ConditionInputs:
        """Returns the inputs of a prompt. Reads and hashes its images."""
        return ConditionInputs(prompt.text, prompt.images, _digest(prompt.images) if prompt.images else "")

    def with_text(self, text: str) -> ConditionInputs:
        """Returns inputs with the same images and another text."""
        return replace(self, text=text)


@dataclass(frozen=True)
class ModelNotes:
    """Notes on a model that are logged for the user."""

    differences: tuple[str, ...] = ()  # how sampling here differs from the call of its diffusers pipeline, a line each
    # How a guidance-distilled model gets its guidance scale; None for a model that is not distilled
    distilled_guidance: str | None = None


def _digest(images: Sequence[Image.Image]) -> str:
    """Returns a hash of the modes, sizes and pixels of images."""
    digest = hashlib.blake2b(digest_size=16)
    for image in images:
        digest.update(f"{image.mode} {image.size}".encode())
        digest.update(image.tobytes())
    return digest.hexdigest()


class Family(Protocol):
    """A loaded model of one family: encodes prompts, calls the network and decodes latents.

    Latents are [channel, height, width] for an image and [channel, frame, height, width] for a video, fp32, however the
    network packs them. `space` says what the network predicts: "velocity" is noise - data, at x = (1 - sigma) data +
    sigma noise; "noise" is the noise, at x = sqrt(1 - sigma^2) data + sigma noise.
    """

    module: nn.Module  # the network that is trained, and that DeepSpeed wraps

    @property
    def space(self) -> Space: ...

    @property
    def norm_patch(self) -> int | None:
        """The side of the patches of latents in which the guided prediction is rescaled to the norm of the conditional
        one, as Qwen-Image does; None: it is not rescaled."""
        ...

    @property
    def notes(self) -> ModelNotes: ...

    def latent_shape(self, resolution: Resolution, frames: int | None = None) -> Shape:
        """Returns the shape of the latents of one image at `resolution` pixels, or of a video of `frames` frames; None:
        the model's default. Raises UserError for sizes that the VAE or the patch size cannot divide."""
        ...

    def grid(self, steps: int, shape: Shape) -> Grid:
        """Returns the noise levels of `steps` denoising steps for latents of `shape`."""
        ...

    def levels(self, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """Maps uniform random numbers in (0, 1) [n] to noise levels for matching: sigmas [n], and times [n] as the
        network takes them."""
        ...

    def encode(self, inputs: Sequence[ConditionInputs], shape: Shape = ()) -> list[Condition]:
        """Returns one condition per input, for latents of `shape`. Moves the encoders to the device and back."""
        ...

    def truncated_tokens(self, text: str) -> int:
        """Returns the number of tokens of a text beyond the encoders' limit, which are cut off."""
        ...

    def predict(
        self, model: NetworkCall, x: Tensor, time: Tensor, conditions: Sequence[Condition], guidance: float | None
    ) -> Tensor:
        """Predicts the velocity or noise (see `space`) of latents x [n, ...] at times `time` [n]: fp32, shaped like x.

        model: `module`, or the engine that wraps it. conditions: one per row; rows may share an object, which is moved
        to the device once. guidance: the scale that guidance-distilled models take as an input; others ignore it.
        """
        ...

    def decode(self, latents: Tensor) -> Tensor:
        """Decodes latents [n, ...] to pixels [n, 3 or 1, height, width], of videos [n, frame, 3 or 1, height, width].
        The range is 0 to 1, but values are not clamped to it."""
        ...

    def decode_with_gradient(self, latents: Tensor) -> Tensor:
        """Decodes as `decode` does, with a gradient to the latents. The decoder stays on the device for the backward
        pass."""
        ...

    def to_latents(self, pixels: Tensor) -> Tensor:
        """Encodes pixels as latents, the inverse of `decode`, for demonstrations."""
        ...

    def save(self, folder: Path, state: dict[str, Tensor]) -> None:
        """Saves the trained weights in the format of the model's library. state: the state dict of `module`."""
        ...

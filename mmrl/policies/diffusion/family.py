"""What the diffusion policy asks of a family of models (Stable Diffusion 3, FLUX, ..., or a small network)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from mmrl.samplers.settings import Space
from mmrl.samplers.sigmas import Grid

Shape = tuple[int, ...]  # of a latent
Condition = dict[str, Tensor]  # what the text encoders say of one prompt; no batch dimension, on the CPU


class Family(Protocol):
    """One loaded model: how its prompts are encoded, its network called and its latents decoded.

    Latents are always [channel, height, width] an image, fp32, however the network packs them. `space` says what the
    network predicts: "velocity" the velocity noise - data at x = (1 - sigma) data + sigma noise, "noise" the noise at
    x = sqrt(1 - sigma^2) data + sigma noise.
    """

    module: nn.Module  # what is trained, and what the engine wraps

    @property
    def space(self) -> Space: ...

    def latent_shape(self, resolution: int | None) -> Shape:
        """Of one image of `resolution` x `resolution` pixels; None: the model's own size."""
        ...

    def grid(self, steps: int, shape: Shape) -> Grid:
        """The noise levels of a chain of `steps` steps over latents of `shape`."""
        ...

    def levels(self, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """Noise levels for training without a chain: uniform draws in (0, 1) [n] -> (sigma [n], time [n])."""
        ...

    def encode(self, texts: Sequence[str]) -> list[Condition]:
        """One condition a text. The text encoders are on the device only while this runs."""
        ...

    def predict(
        self, model: Any, x: Tensor, time: Tensor, conditions: Sequence[Condition], guidance: float | None
    ) -> Tensor:
        """Velocity (or noise) [n, channel, height, width] fp32 of latents x [n, ...] at times [n].

        `model` is `module` or the engine around it. `guidance` is the embedded scale of a guidance-distilled model;
        others ignore it.
        """
        ...

    def decode(self, latents: Tensor) -> Tensor:
        """[n, channel, height, width] latents -> [n, 3 or 1, height, width] pixels, 0 to 1 in gamut, not clamped."""
        ...

    def to_latents(self, pixels: Tensor) -> Tensor:
        """The inverse of `decode` [n, 3 or 1, height, width] -> [n, channel, height, width], for demonstrations."""
        ...

    def save(self, folder: Path, state: dict[str, Tensor]) -> None:
        """Write the trained weights (of `module`) in the library's own format."""
        ...

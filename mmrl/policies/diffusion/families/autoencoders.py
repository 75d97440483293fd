"""Decodes latents to pixels and encodes pixels to latents, with the VAEs of pipelines."""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from mmrl.policies.diffusion.families.components import PipelineParts


class ImageAutoencoder:
    """A VAE of images. It is on the device of the network only while it runs.

    "Latents" are normalised, as the network takes them; "z" are the latents of the VAE, which are not normalised.
    """

    def __init__(self, parts: PipelineParts) -> None:
        self.parts = parts

    @property
    def vae(self) -> Any:
        """The VAE of the pipeline."""
        return self.parts.pipe.vae

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Decodes latents to pixels; see `Family.decode`."""
        with self.parts.visiting("vae"):
            return self.decode_on_device(latents)

    def decode_on_device(self, latents: Tensor) -> Tensor:
        """Decodes as `decode` does, with a VAE that is on the device already, and with a gradient."""
        scale, shift = self.latent_scale()
        return self.to_pixels(latents.float().to(self.parts.device) * scale + shift) / 2 + 0.5

    def decode_with_gradient(self, latents: Tensor) -> Tensor:
        """Decodes as `decode` does, with a gradient to the latents. The VAE stays on the device."""
        self.vae.to(self.parts.device).requires_grad_(False)
        return self.decode_on_device(latents)

    @torch.no_grad()
    def encode(self, pixels: Tensor) -> Tensor:
        """Encodes pixels to latents, the inverse of `decode`."""
        scale, shift = self.latent_scale()
        with self.parts.visiting("vae"):
            return (self.to_z(pixels.float().to(self.parts.device) * 2 - 1) - shift) / scale

    def latent_scale(self) -> tuple[Tensor, Tensor]:
        """Returns scale and shift of z = latents x scale + shift, [channel or 1, 1, 1] each."""
        config, device = self.vae.config, self.parts.device
        scale = torch.tensor(config.get("latents_std") or 1.0) / config.get("scaling_factor", 1.0)
        shift = torch.tensor(config.get("latents_mean") or config.get("shift_factor") or 0.0)
        return scale.reshape(-1, 1, 1).to(device), shift.reshape(-1, 1, 1).to(device)

    def to_pixels(self, z: Tensor) -> Tensor:
        """Decodes z to pixels from -1 to 1."""
        return self.vae.decode(z, return_dict=False)[0]

    def to_z(self, pixels: Tensor) -> Tensor:
        """Encodes pixels from -1 to 1 to z, the inverse of `to_pixels`."""
        return self.vae.encode(pixels).latent_dist.mode()  # the mean, not a sample: encoding is deterministic


class OneFrameAutoencoder(ImageAutoencoder):
    """A video VAE that is used for images, as videos of one frame."""

    def to_pixels(self, z: Tensor) -> Tensor:
        return super().to_pixels(rearrange(z, "n c h w -> n c 1 h w")).squeeze(2)

    def to_z(self, pixels: Tensor) -> Tensor:
        return super().to_z(rearrange(pixels, "n c h w -> n c 1 h w")).squeeze(2)


class PatchedAutoencoder(ImageAutoencoder):
    """A VAE whose z is rearranged in patches of 2 x 2, with normalisation by running statistics (FLUX.2)."""

    def latent_scale(self) -> tuple[Tensor, Tensor]:
        norm, device = self.vae.bn, self.parts.device
        std = (norm.running_var + self.vae.config.batch_norm_eps).sqrt()
        return std.view(-1, 1, 1).to(device), norm.running_mean.view(-1, 1, 1).to(device)

    def to_pixels(self, z: Tensor) -> Tensor:
        return super().to_pixels(rearrange(z, "n (c p q) h w -> n c (h p) (w q)", p=2, q=2))

    def to_z(self, pixels: Tensor) -> Tensor:
        return rearrange(super().to_z(pixels), "n c (h p) (w q) -> n (c p q) h w", p=2, q=2)


class VideoAutoencoder(ImageAutoencoder):
    """A VAE of videos: latents [n, channel, frame, height, width], pixels [n, frame, channel, height, width]."""

    def latent_scale(self) -> tuple[Tensor, Tensor]:
        scale, shift = super().latent_scale()
        return scale[:, None], shift[:, None]

    def to_pixels(self, z: Tensor) -> Tensor:
        return rearrange(super().to_pixels(z), "n c f h w -> n f c h w")

    def to_z(self, pixels: Tensor) -> Tensor:
        return super().to_z(rearrange(pixels, "n f c h w -> n c f h w"))


class WanAutoencoder(VideoAutoencoder):
    """The VAE of Wan, which has mean and standard deviation of latents in its configuration."""

    def latent_scale(self) -> tuple[Tensor, Tensor]:
        config, device = self.vae.config, self.parts.device
        std, mean = (torch.tensor(v, device=device) for v in (config.latents_std, config.latents_mean))
        return std.view(-1, 1, 1, 1), mean.view(-1, 1, 1, 1)


class LTXAutoencoder(VideoAutoencoder):
    """The VAE of LTX-Video, which has mean and standard deviation of latents as buffers."""

    def latent_scale(self) -> tuple[Tensor, Tensor]:
        statistics = (self.vae.latents_std, self.vae.latents_mean)
        std, mean = (values.to(self.parts.device).float().view(-1, 1, 1, 1) for values in statistics)
        return std / self.vae.config.scaling_factor, mean

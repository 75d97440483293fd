"""Diffusion and flow models as policies: one decision a denoising step, or a matching likelihood."""

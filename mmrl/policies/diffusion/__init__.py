"""Diffusion and flow models as policies: one decision a denoising step, or a matching likelihood."""

from pathlib import Path
from typing import Any

from mmrl.policies.diffusion import small
from mmrl.policies.diffusion.family import Family
from mmrl.policies.diffusion.policy import DiffusionPolicy

__all__ = ["DiffusionPolicy", "Family", "load"]


def load(path: Path, *, reference: bool = False, **options: Any) -> Family:
    """The model at `path`: a small network of our own, or a diffusers pipeline, for which `options` are."""
    return small.load(path, reference=reference)

"""Diffusion and flow models as policies: one decision a denoising step, or a matching likelihood."""

from pathlib import Path
from typing import Any

from mmrl.errors import UserError
from mmrl.policies.diffusion import small
from mmrl.policies.diffusion.family import Family
from mmrl.policies.diffusion.policy import DiffusionPolicy

__all__ = ["DiffusionPolicy", "Family", "load"]


def load(path: str, *, reference: bool = False, **options: Any) -> Family:
    """The model at `path`: a small network of our own, or a diffusers pipeline, which takes `options` (see
    `pipelines.load`)."""
    if (Path(path) / small.CONFIG).is_file():
        if options.get("lora") is not None:
            raise UserError("model.lora is for diffusers pipelines; a small network is trained whole")
        return small.load(Path(path), reference=reference)
    from mmrl.policies.diffusion import pipelines  # diffusers is an extra

    return pipelines.load(path, reference=reference, **options)

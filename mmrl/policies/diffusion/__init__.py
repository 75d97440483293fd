"""Diffusion and flow models as policies: one decision a denoising step, or a matching likelihood."""

from pathlib import Path
from typing import Any

from mmrl.errors import UserError
from mmrl.policies.diffusion import small
from mmrl.policies.diffusion.family import Family
from mmrl.policies.diffusion.policy import DiffusionPolicy

__all__ = ["DiffusionPolicy", "Family", "load"]


PIPELINES_ONLY = {"lora": None, "attention": "sdpa", "activation_checkpointing": False}  # and what leaves them unset


def load(path: str, *, dtype: str = "float32", reference: bool = False, **options: Any) -> Family:
    """The model at `path`: a small network of our own, or a diffusers pipeline, which takes `options` (see
    `pipelines.load`). Raises UserError for an option that a small network does not have."""
    if (Path(path) / small.CONFIG).is_file():
        for name, unset in PIPELINES_ONLY.items():
            if options.get(name, unset) != unset:
                raise UserError(f"model.{name} is for diffusers pipelines; a small network is trained whole, as it is")
        return small.load(Path(path), dtype=dtype, reference=reference)
    from mmrl.policies.diffusion import pipelines  # diffusers is an extra

    return pipelines.load(path, dtype=dtype, reference=reference, **options)

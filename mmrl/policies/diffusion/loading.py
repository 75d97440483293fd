"""Loads diffusion models from folders and hub names."""

from __future__ import annotations

from pathlib import Path

from mmrl.errors import UserError
from mmrl.policies.diffusion import small
from mmrl.policies.diffusion.family import Family
from mmrl.policies.diffusion.settings import DiffusionModel

PIPELINES_ONLY = (
    "base",
    "lora",
    "attention",
    "activation_checkpointing",
    "text_tokens",
    "encoders",
    "embeddings",
    "decoding",
)


def is_small(path: str) -> bool:
    """Returns whether the folder `path` holds a small network of mmrl's own."""
    return (Path(path) / small.CONFIG).is_file()


def load(path: str, model: DiffusionModel) -> Family:
    """Loads the model at `path`: a small network of mmrl's own, or a diffusers pipeline.

    Raises UserError for an option that a small network does not have, and where `pipelines.load` does.
    """
    if not is_small(path):
        from mmrl.policies.diffusion import pipelines  # diffusers is an extra

        return pipelines.load(path, model)
    for name in PIPELINES_ONLY:
        if vars(model)[name] != DiffusionModel.model_fields[name].default:
            raise UserError(f"model.{name} is for diffusers pipelines; a small network is trained whole, as it is")
    return small.load(Path(path), dtype=model.dtype)

"""Loads diffusion models from folders, or from the Hugging Face hub by name."""

from __future__ import annotations

from pathlib import Path

from mmrl.errors import UserError
from mmrl.policies.diffusion import small
from mmrl.policies.diffusion.family import Family
from mmrl.policies.diffusion.settings import DiffusionModel

# Settings of `DiffusionModel` that small networks do not have
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
    """Returns whether the folder `path` holds a small network of mmrl's own (small.py), not a diffusers pipeline."""
    return (Path(path) / small.CONFIG).is_file()


def load(path: str, model: DiffusionModel) -> Family:
    """Loads the model at `path`: a small network of mmrl's own, or a diffusers pipeline.

    Raises UserError for a setting that a small network does not have, and as `pipelines.load` does.
    """
    if not is_small(path):
        from mmrl.policies.diffusion import pipelines  # diffusers is an extra

        return pipelines.load(path, model)
    for name in PIPELINES_ONLY:
        if vars(model)[name] != DiffusionModel.model_fields[name].default:
            raise UserError(
                f"model.{name} is for diffusers pipelines, but model.path={path} is a small network of mmrl's own; "
                "leave it out"
            )
    return small.load(Path(path), dtype=model.dtype)

"""Loads an image generator and the language model that rewrites its prompts (the writer)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mmrl.errors import UserError
from mmrl.policies.diffusion import loading as diffusion
from mmrl.policies.diffusion.policy import DiffusionPolicy
from mmrl.policies.prompt_rewriting.policy import PromptRewritingPolicy
from mmrl.policies.prompt_rewriting.settings import GENERATOR, WRITER, PromptRewritingModel
from mmrl.policies.vlm import loading as vlm
from mmrl.policies.vlm.settings import VisionLanguageModel

if TYPE_CHECKING:
    from mmrl.protocols.job import JobConfig

WRITER_OPTIONS = ("attention", "freeze", "lora", "processor")  # keys of model.writer that vision-language models have


def load(path: str, settings: PromptRewritingModel, config: JobConfig, task: object) -> PromptRewritingPolicy:
    """Loads the policy of a job. `path` names the image generator, and model.writer.path the language model that writes
    prompts, by folder or hub name; or `path` is a folder that a run saved, which holds generator and writer.

    Raises UserError if there is no writer, and as the loaders of the two models do."""
    saved_writer = Path(path) / WRITER
    writer_path = settings.writer.existing() or (str(saved_writer) if saved_writer.is_dir() else None)
    if writer_path is None:
        raise UserError(
            f"model.writer.path is missing: model.path={path} holds an image generator, but no language model that "
            "rewrites prompts; set model.writer.path to one"
        )
    saved_generator = Path(path) / GENERATOR
    generator_path = str(saved_generator) if saved_generator.is_dir() else path
    generator = DiffusionPolicy(diffusion.load(generator_path, settings), config.section("denoising"))
    options = {name: vars(settings.writer)[name] for name in WRITER_OPTIONS}
    writer_settings = VisionLanguageModel(
        path=writer_path, dtype=settings.dtype, activation_checkpointing=settings.activation_checkpointing, **options
    )
    return PromptRewritingPolicy(vlm.load(writer_path, writer_settings, config), generator, settings.writer)

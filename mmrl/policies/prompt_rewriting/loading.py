"""Loads a generator and a writer of prompts, from their own folders or from one that a run saved."""

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

WRITER_OPTIONS = ("attention", "freeze", "lora", "processor")


def load(path: str, settings: PromptRewritingModel, config: JobConfig, task: object) -> PromptRewritingPolicy:
    """Builds the policy of a job: the generator at `path` and the writer that the settings name, or both from a folder
    that a run saved. Raises UserError where there is no writer, and where the loaders of the two do."""
    both = Path(path) / WRITER
    writer = settings.writer.existing() or (str(both) if both.is_dir() else None)
    if writer is None:
        raise UserError(f"model.writer.path is missing: model.path={path} holds a generator and no writer of prompts")
    generator = Path(path) / GENERATOR
    generator_policy = DiffusionPolicy(
        diffusion.load(str(generator) if generator.is_dir() else path, settings), config.section("denoising")
    )
    options = {name: vars(settings.writer)[name] for name in WRITER_OPTIONS}
    writer_model = VisionLanguageModel(
        path=writer, dtype=settings.dtype, activation_checkpointing=settings.activation_checkpointing, **options
    )
    return PromptRewritingPolicy(vlm.load(writer, writer_model, config), generator_policy, settings.writer)

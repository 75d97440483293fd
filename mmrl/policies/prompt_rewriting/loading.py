"""A generator and a writer of prompts, from their folders or from the one that a run left."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mmrl.errors import UserError
from mmrl.policies.diffusion import loading as diffusion
from mmrl.policies.diffusion.policy import DiffusionPolicy
from mmrl.policies.prompt_rewriting.policy import RewrittenPolicy
from mmrl.policies.prompt_rewriting.settings import GENERATOR, WRITER, RewrittenModel
from mmrl.policies.vlm import loading as vlm
from mmrl.policies.vlm.settings import VisionLanguageModel

if TYPE_CHECKING:
    from mmrl.protocols.job import JobConfig

FOR_THE_WRITER = ("attention", "freeze", "lora", "processor")


def load(path: str, settings: RewrittenModel, config: JobConfig, task: object) -> RewrittenPolicy:
    """The policy of a job: the generator at `path`, and the writer that the settings name, or both from a folder that a
    run left. Raises UserError where the writer is neither named nor there, and as the loaders of the two."""
    both = Path(path) / WRITER
    writer = settings.writer.path or (str(both) if both.is_dir() else None)
    if writer is None:
        raise UserError(f"model.writer.path is missing: model.path={path} holds a generator and no writer of prompts")
    generator = Path(path) / GENERATOR
    drawn = DiffusionPolicy(
        diffusion.load(str(generator) if generator.is_dir() else path, settings), config.section("denoising")
    )
    own = {name: vars(settings.writer)[name] for name in FOR_THE_WRITER}
    words = VisionLanguageModel(
        path=writer, dtype=settings.dtype, activation_checkpointing=settings.activation_checkpointing, **own
    )
    return RewrittenPolicy(vlm.load(writer, words, config), drawn, settings.writer)

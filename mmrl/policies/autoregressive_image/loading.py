"""Loads models that write image tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    JanusConfig,
    JanusForConditionalGeneration,
)

from mmrl.errors import UserError
from mmrl.policies import codebook
from mmrl.policies.autoregressive_image.policy import ImageTokenPolicy
from mmrl.policies.autoregressive_image.scorer import ImageTokenScorer
from mmrl.policies.autoregressive_image.settings import (
    AutoregressiveImageModel,
    ImageTokenDrawing,
    ImageTokenLimits,
    ImageTokenSampling,
)
from mmrl.policies.autoregressive_image.writers import CausalWriter, ImageTokenWriter, JanusWriter, freeze_readers
from mmrl.policies.tokenizers import Tokenizer
from mmrl.policies.vlm.loading import adapt, load_config, load_pretrained, load_tokenizer, recompute_activations
from mmrl.schedules.schedule import constant

if TYPE_CHECKING:
    from mmrl.protocols.job import JobConfig


def load(path: str, settings: AutoregressiveImageModel, config: JobConfig) -> ImageTokenPolicy:
    """Loads the policy of a job. Raises UserError without a causal language model at `path`, or without a codebook
    beside it."""
    limits: ImageTokenLimits = config.rollout
    drawing: ImageTokenDrawing = config.section("drawing")
    tokenizer = load_tokenizer(path)
    model_config, writer = load_config(path), None
    if isinstance(model_config, JanusConfig):
        core = load_pretrained(JanusForConditionalGeneration, path, settings.dtype, settings.attention)
    elif type(model_config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        writer = codebook_writer(path)
        core = load_pretrained(AutoModelForCausalLM, path, settings.dtype, settings.attention)
    else:
        raise UserError(
            f"model.path={path} is a {model_config.model_type} model, which does not write token after token"
        )
    model = adapt(core, path, freeze=(), lora=settings.lora)
    freeze_readers(model)
    if settings.activation_checkpointing:
        recompute_activations(model)
    writer = writer or JanusWriter(model, tokenizer, path)
    writer.check(model, tokenizer)
    return ImageTokenPolicy(
        ImageTokenScorer(model, writer, text_vocabulary(tokenizer, writer)),
        tokenizer,
        drawing,
        max_prompt_length=limits.max_prompt_length,
        temperature=limits.temperature if isinstance(limits, ImageTokenSampling) else constant(1.0),
        evaluation_temperature=config.evaluation.temperature,
        reasoning_length=limits.reasoning_length,
    )


def codebook_writer(path: str) -> ImageTokenWriter:
    """Returns the writer of a causal model, by the codebook in its folder. Raises UserError where there is none."""
    book = codebook.read(path)
    if book is None:
        raise UserError(
            f"model.path={path} has no {codebook.NAME}.safetensors, which says what images its tokens are; see "
            "mmrl/policies/codebook.py"
        )
    return CausalWriter(book)


def text_vocabulary(tokenizer: Tokenizer, writer: ImageTokenWriter) -> Tensor:
    """Returns which tokens below the first image token may be written as text, [text token] bool: words and the end
    token, but no tokens that stand for padding, for images or for roles in a chat. Raises UserError without an end
    token."""
    if tokenizer.eos_token_id is None:
        raise UserError("the tokenizer has no end token (eos_token), which ends the text before an image")
    allowed = torch.zeros(writer.first, dtype=torch.bool)
    allowed[: len(tokenizer)] = True
    special = [i for i in tokenizer.all_special_ids if i < writer.first]
    allowed[special] = False
    allowed[tokenizer.eos_token_id] = True
    return allowed

"""Loads autoregressive image models."""

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
from mmrl.policies.autoregressive_image.writers import CausalWriter, ImageTokenWriter, JanusWriter, freeze_untrained
from mmrl.policies.tokenizers import Tokenizer
from mmrl.policies.vlm.loading import adapt, load_config, load_pretrained, load_tokenizer, recompute_activations
from mmrl.schedules.schedule import constant

if TYPE_CHECKING:
    from mmrl.protocols.job import JobConfig


def load(path: str, settings: AutoregressiveImageModel, config: JobConfig) -> ImageTokenPolicy:
    """Loads the policy of a job. Raises UserError unless there is a Janus model or a causal language model with a
    codebook at `path`."""
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
            f"model.path={path} is a model of type {model_config.model_type}, which does not generate token by token; "
            "take a causal language model with a codebook, or Janus"
        )
    model = adapt(core, path, freeze=(), lora=settings.lora)
    freeze_untrained(model)
    if settings.activation_checkpointing:
        recompute_activations(model)
    writer = writer or JanusWriter(model, tokenizer, path)
    writer.check(model, tokenizer)
    return ImageTokenPolicy(
        ImageTokenScorer(model, writer, text_vocabulary(tokenizer, writer)),
        tokenizer,
        drawing,
        max_prompt_length=limits.max_prompt_length,
        # demonstrations are not sampled; they are scored at temperature 1
        temperature=limits.temperature if isinstance(limits, ImageTokenSampling) else constant(1.0),
        evaluation_temperature=config.evaluation.temperature,
        reasoning_length=limits.reasoning_length,
    )


def codebook_writer(path: str) -> ImageTokenWriter:
    """Returns the adapter that converts between tokens and images, for a causal language model with a codebook in the
    folder `path`. Raises UserError if the folder has no codebook."""
    book = codebook.read(path)
    if book is None:
        raise UserError(
            f"model.path={path} has no {codebook.NAME}.safetensors, which maps image tokens to pixels; write one into "
            "this folder with mmrl.policies.codebook:write"
        )
    return CausalWriter(book)


def text_vocabulary(tokenizer: Tokenizer, writer: ImageTokenWriter) -> Tensor:
    """Returns the tokens that may be sampled in the text before an image, as a mask [token below the first image token]
    bool: the end token and all tokens that are not special (padding, images, roles of a chat). Raises UserError if the
    tokenizer has no end token."""
    if tokenizer.eos_token_id is None:
        raise UserError(
            "the tokenizer of model.path has no eos_token, which ends a text; set it in tokenizer_config.json"
        )
    allowed = torch.zeros(writer.first, dtype=torch.bool)
    allowed[: len(tokenizer)] = True
    special = [i for i in tokenizer.all_special_ids if i < writer.first]
    allowed[special] = False
    allowed[tokenizer.eos_token_id] = True
    return allowed

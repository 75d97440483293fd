"""Models that write images as codes, from folders."""

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
from mmrl.policies.autoregressive_image.policy import CodePolicy
from mmrl.policies.autoregressive_image.scorer import CodeScorer
from mmrl.policies.autoregressive_image.settings import CodeDrawing, CodeLimits, CodeModel, CodeSampling
from mmrl.policies.autoregressive_image.writers import CausalWriter, ImageTokenWriter, JanusWriter, freeze_readers
from mmrl.policies.tokenizers import Tokenizer
from mmrl.policies.vlm.loading import adapt, described, load_tokenizer, recompute_activations, whole
from mmrl.schedules.schedule import constant

if TYPE_CHECKING:
    from mmrl.protocols.job import JobConfig


def load(path: str, settings: CodeModel, config: JobConfig) -> CodePolicy:
    """The policy of a job. Raises UserError without a causal language model at `path`, or a codebook beside it."""
    limits: CodeLimits = config.rollout
    drawing: CodeDrawing = config.section("drawing")
    tokenizer = load_tokenizer(path)
    known, writer = described(path), None
    if isinstance(known, JanusConfig):
        model = whole(JanusForConditionalGeneration, path, settings.dtype, settings.attention)
    elif type(known) in MODEL_FOR_CAUSAL_LM_MAPPING:
        writer = beside(path)
        model = whole(AutoModelForCausalLM, path, settings.dtype, settings.attention)
    else:
        raise UserError(f"model.path={path} is a {known.model_type} model, which does not write token after token")
    model = adapt(model, path, freeze=(), lora=settings.lora)
    freeze_readers(model)
    if settings.activation_checkpointing:
        recompute_activations(model)
    writer = writer or JanusWriter(model, tokenizer, path)
    writer.check(model, tokenizer)
    return CodePolicy(
        CodeScorer(model, writer, words_of(tokenizer, writer)),
        tokenizer,
        drawing,
        max_prompt_length=limits.max_prompt_length,
        temperature=limits.temperature if isinstance(limits, CodeSampling) else constant(1.0),
        evaluation_temperature=config.evaluation.temperature,
        reasoning_length=limits.reasoning_length,
    )


def beside(path: str) -> ImageTokenWriter:
    """The writer of a causal model, by the codebook in its folder. Raises UserError where there is none."""
    codes = codebook.read(path)
    if codes is None:
        raise UserError(
            f"model.path={path} has no {codebook.NAME}.safetensors, which says what images its tokens are; see "
            "mmrl/policies/codebook.py"
        )
    return CausalWriter(codes)


def words_of(tokenizer: Tokenizer, writer: ImageTokenWriter) -> Tensor:
    """[word] bool over the tokens below the first code: which may be written before codes. Those are words and the end
    token, not what stands for padding, for images or for places in a chat. Raises UserError without an end token."""
    if tokenizer.eos_token_id is None:
        raise UserError("the tokenizer has no end token (eos_token), which ends the text before codes")
    allowed = torch.zeros(writer.first, dtype=torch.bool)
    allowed[: len(tokenizer)] = True
    special = [i for i in tokenizer.all_special_ids if i < writer.first]
    allowed[special] = False
    allowed[tokenizer.eos_token_id] = True
    return allowed

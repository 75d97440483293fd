"""Discrete diffusion models from folders and hub names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
)

from mmrl.errors import UserError
from mmrl.policies import codebook
from mmrl.policies.codebook import Codebook
from mmrl.policies.discrete_diffusion.policy import MaskedPolicy, TokenDiffusionOptions
from mmrl.policies.discrete_diffusion.responses import ResponseLayout
from mmrl.policies.discrete_diffusion.scorer import MaskScorer, Vocabulary
from mmrl.policies.discrete_diffusion.settings import (
    MaskedLimits,
    MaskedModel,
    MaskedSampling,
    TokenDiffusionModel,
    UnmaskingDemonstrations,
    UnmaskingRollouts,
    WritingLimits,
)
from mmrl.policies.discrete_diffusion.uniform import UniformPolicy
from mmrl.policies.discrete_diffusion.uniform_settings import Noising, UniformModel
from mmrl.policies.tokenizers import Tokenizer
from mmrl.policies.vlm.critic import critic_of
from mmrl.policies.vlm.loading import adapt, described, load_tokenizer, recompute_activations, whole
from mmrl.policies.vlm.scorer import transformers_model
from mmrl.protocols.critic import SharedCritic
from mmrl.schedules.schedule import constant

if TYPE_CHECKING:
    from mmrl.protocols.job import JobConfig

NO_MASK = -1  # in the place of a mask token, of policies that have no empty places


def load(path: str, settings: MaskedModel, config: JobConfig) -> MaskedPolicy:
    """The policy of a job. Raises UserError if there is no model at `path`, or none that can fill empty places."""
    unmasking: UnmaskingRollouts | UnmaskingDemonstrations = config.section("unmasking")
    read = read_model(path, settings, config, MaskedPolicy.kind, lambda tokenizer: mask_of(tokenizer, settings))
    if isinstance(config.needs.critic, SharedCritic):
        read.scorer.critic = critic_of(transformers_model(read.scorer.model), config.needs.critic, Path(path))
    return MaskedPolicy(*read, unmasking, unmasking.likelihood)


def load_uniform(path: str, settings: UniformModel, config: JobConfig) -> UniformPolicy:
    """The policy of a job. Raises UserError if there is no model at `path`, or none that writes text."""
    noising: Noising = config.section("noising")
    return UniformPolicy(*read_model(path, settings, config, UniformPolicy.kind, lambda tokenizer: NO_MASK), noising)


class ReadModel(NamedTuple):
    """What policies of discrete diffusion are made of."""

    scorer: MaskScorer
    layout: ResponseLayout
    options: TokenDiffusionOptions


def read_model(
    path: str, settings: TokenDiffusionModel, config: JobConfig, kind: str, mask: Callable[[Tokenizer], int]
) -> ReadModel:
    """The model at `path`. kind: of it, as `model.type` has it. mask: the token of empty places, of a tokenizer. Raises
    UserError."""
    limits: MaskedLimits = config.rollout
    known = described(path)
    causal = type(known) not in MODEL_FOR_MASKED_LM_MAPPING
    if causal and type(known) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(f"model.path={path} is a {known.model_type} model, which does not write text")
    made = AutoModelForCausalLM if causal else AutoModelForMaskedLM
    model = whole(made, path, settings.dtype, settings.attention)
    most = known.get_text_config().max_position_embeddings
    text = limits.reasoning_length if isinstance(limits, WritingLimits) else 0
    length = text + limits.response_length
    if length >= most:
        more = f"with rollout.reasoning_length={text} before it " if text else ""
        raise UserError(
            f"rollout.response_length={limits.response_length} {more}leaves no room for a prompt in the {most} tokens "
            f"that model.path={path} can read; lower it"
        )
    model = adapt(model, path, freeze=(), lora=settings.lora)
    if settings.activation_checkpointing:
        recompute_activations(model)
    tokenizer, codes = load_tokenizer(path), codebook.read(path)
    if text and codes is None:
        raise UserError(
            f"rollout.reasoning_length={text} writes text before the codes of an image, and model.path={path} has no "
            "codebook; leave it out: rollout.response_length is that of the text"
        )
    if codes is not None and codes.places != limits.response_length:
        raise UserError(
            f"model.path={path} writes images of {codes.places} codes; set rollout.response_length={codes.places}"
        )
    size = transformers_model(model).get_output_embeddings().weight.shape[0]
    vocabulary = vocabulary_of(tokenizer, mask(tokenizer), size, codes, text=text > 0)
    layout = ResponseLayout(
        kind,
        tokenizer,
        vocabulary,
        length=length,
        max_prompt_length=min(limits.max_prompt_length, most - length),
        codes=codes,
        reasoning_length=text,
    )
    options = TokenDiffusionOptions(
        temperature=limits.temperature if isinstance(limits, MaskedSampling) else constant(1.0),
        evaluation_temperature=config.evaluation.temperature,
        keeps_distributions="distribution" in config.needs.offers,
    )
    return ReadModel(MaskScorer(model, vocabulary, causal=causal, shifted=settings.shifted), layout, options)


def mask_of(tokenizer: Tokenizer, settings: MaskedModel) -> int:
    """The token of empty places. Raises UserError without one."""
    mask = tokenizer.mask_token_id
    if settings.mask_token is not None:
        mask = tokenizer.get_vocab().get(settings.mask_token)
    if mask is None:
        raise UserError(
            f"model.mask_token={settings.mask_token} is no token of the model's tokenizer; name the one that stands in "
            "empty places"
        )
    return int(mask)


def vocabulary_of(
    tokenizer: Tokenizer, mask: int, size: int, codes: Codebook | None, *, text: bool = False
) -> Vocabulary:
    """size: rows of the output layer. Never drawn are special tokens other than the end, and rows beyond the tokenizer;
    with `codes` whatever is none of them. With both codes and `text` each has places of its own; text holds no code.

    Raises UserError without an end token."""
    if codes is not None and not text:
        return Vocabulary(mask, tokenizer.pad_token_id or 0, None, codes.outside(size))
    end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
    if end is None:
        raise UserError("the model's tokenizer has neither an end token nor a separator")
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    beyond = set(range(len(tokenizer), size))
    if codes is not None:
        beyond |= set(range(codes.first, codes.first + len(codes.patches)))
    suppressed = sorted((special | {mask} | beyond) - {end, NO_MASK})
    pad = end if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return Vocabulary(mask, pad, end, torch.tensor(suppressed), None if codes is None else codes.outside(size))

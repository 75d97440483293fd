"""Loads discrete diffusion models from folders and hub names."""

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
from mmrl.policies.discrete_diffusion.checkpoint_conversion import SHIFTED
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
    check_shift,
)
from mmrl.policies.discrete_diffusion.uniform import UniformPolicy
from mmrl.policies.discrete_diffusion.uniform_settings import Noising, UniformModel
from mmrl.policies.tokenizers import Tokenizer
from mmrl.policies.vlm.critic import critic_of
from mmrl.policies.vlm.loading import adapt, load_config, load_pretrained, load_tokenizer, recompute_activations
from mmrl.policies.vlm.scorer import transformers_model
from mmrl.protocols.critic import SharedCritic
from mmrl.schedules.schedule import constant

if TYPE_CHECKING:
    from mmrl.protocols.job import JobConfig

NO_MASK = -1  # the mask token of policies without masked positions


def load(path: str, settings: MaskedModel, config: JobConfig) -> MaskedPolicy:
    """Loads the policy of a job. Raises UserError if there is no model at `path`, or none that can fill empty
    positions."""
    unmasking: UnmaskingRollouts | UnmaskingDemonstrations = config.section("unmasking")
    read = read_model(path, settings, config, MaskedPolicy.kind, lambda tokenizer: mask_of(tokenizer, settings))
    try:
        check_shift(unmasking, shifted=read.scorer.shifted)
    except ValueError as error:
        raise UserError(f"model.path={path}: {error}") from None
    if isinstance(config.needs.critic, SharedCritic):
        read.scorer.critic = critic_of(transformers_model(read.scorer.model), config.needs.critic, Path(path))
    return MaskedPolicy(*read, unmasking, unmasking.likelihood)


def load_uniform(path: str, settings: UniformModel, config: JobConfig) -> UniformPolicy:
    """Loads the policy of a job. Raises UserError if there is no model at `path`, or none that writes text."""
    noising: Noising = config.section("noising")
    return UniformPolicy(*read_model(path, settings, config, UniformPolicy.kind, lambda tokenizer: NO_MASK), noising)


class ReadModel(NamedTuple):
    """The parts of a discrete diffusion policy."""

    scorer: MaskScorer
    layout: ResponseLayout
    options: TokenDiffusionOptions


def read_model(
    path: str, settings: TokenDiffusionModel, config: JobConfig, kind: str, mask: Callable[[Tokenizer], int]
) -> ReadModel:
    """Loads the model at `path`. kind: `model.type`. mask: returns the mask token of a tokenizer. Raises UserError."""
    limits: MaskedLimits = config.rollout
    model_config = load_config(path)
    causal = type(model_config) not in MODEL_FOR_MASKED_LM_MAPPING
    if causal and type(model_config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(f"model.path={path} is a {model_config.model_type} model, which does not write text")
    model_class = AutoModelForCausalLM if causal else AutoModelForMaskedLM
    core = load_pretrained(model_class, path, settings.dtype, settings.attention)
    context = model_config.get_text_config().max_position_embeddings
    text = limits.reasoning_length if isinstance(limits, WritingLimits) else 0
    length = text + limits.response_length
    if length >= context:
        more = f"with rollout.reasoning_length={text} before it " if text else ""
        raise UserError(
            f"rollout.response_length={limits.response_length} {more}leaves no room for a prompt in the {context} "
            f"tokens that model.path={path} can read; lower it"
        )
    model = adapt(core, path, freeze=(), lora=settings.lora)
    if settings.activation_checkpointing:
        recompute_activations(model)
    tokenizer, image_codebook = load_tokenizer(path), codebook.read(path)
    if text and image_codebook is None:
        raise UserError(
            f"rollout.reasoning_length={text} writes text before the tokens of an image, and model.path={path} has no "
            "codebook; leave it out: rollout.response_length is that of the text"
        )
    if image_codebook is not None and image_codebook.tokens_per_image != limits.response_length:
        raise UserError(
            f"model.path={path} writes images of {image_codebook.tokens_per_image} tokens; set "
            f"rollout.response_length={image_codebook.tokens_per_image}"
        )
    size = transformers_model(model).get_output_embeddings().weight.shape[0]
    vocabulary = vocabulary_of(tokenizer, mask(tokenizer), size, image_codebook, text=text > 0)
    layout = ResponseLayout(
        kind,
        tokenizer,
        vocabulary,
        length=length,
        max_prompt_length=min(limits.max_prompt_length, context - length),
        codebook=image_codebook,
        reasoning_length=text,
    )
    written: bool = model_config.to_dict().get(SHIFTED, False)
    shifted = written if settings.shifted is None else settings.shifted
    options = TokenDiffusionOptions(
        temperature=limits.temperature if isinstance(limits, MaskedSampling) else constant(1.0),
        evaluation_temperature=config.evaluation.temperature,
        keeps_distributions="distribution" in config.needs.offers,
    )
    return ReadModel(MaskScorer(model, vocabulary, causal=causal, shifted=shifted), layout, options)


def mask_of(tokenizer: Tokenizer, settings: MaskedModel) -> int:
    """Returns the mask token. Raises UserError without one."""
    mask = tokenizer.mask_token_id
    if settings.mask_token is not None:
        mask = tokenizer.get_vocab().get(settings.mask_token)
    if mask is None:
        raise UserError(
            f"model.mask_token={settings.mask_token} is not a token of the model's tokenizer; name the one that "
            "stands at empty positions"
        )
    return int(mask)


def vocabulary_of(
    tokenizer: Tokenizer, mask: int, size: int, image_codebook: Codebook | None, *, text: bool = False
) -> Vocabulary:
    """Returns the vocabulary of a policy. size: rows of the output layer. Special tokens other than the end, and rows
    beyond the tokenizer, are never drawn; with a codebook alone, only its tokens are. With both a codebook and `text`
    each kind has positions of its own; text has no image tokens.

    Raises UserError without an end token.
    """
    if image_codebook is not None and not text:
        return Vocabulary(mask, tokenizer.pad_token_id or 0, None, image_codebook.other_tokens(size))
    end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
    if end is None:
        raise UserError("the model's tokenizer has neither an end token nor a separator")
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    beyond = set(range(len(tokenizer), size))
    if image_codebook is not None:
        beyond |= set(range(image_codebook.first, image_codebook.first + len(image_codebook.patches)))
    suppressed = sorted((special | {mask} | beyond) - {end, NO_MASK})
    pad = end if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return Vocabulary(
        mask, pad, end, torch.tensor(suppressed), None if image_codebook is None else image_codebook.other_tokens(size)
    )

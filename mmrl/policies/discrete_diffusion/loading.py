"""Loads discrete diffusion models from folders, or from the Hugging Face hub by name."""

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

NO_MASK = -1  # stands for the id of the mask token in policies that have none


def load(path: str, settings: MaskedModel, config: JobConfig) -> MaskedPolicy:
    """Loads the masked diffusion policy of a job. Raises UserError as `load_parts` does, and if the tokenizer has no
    mask token."""
    unmasking: UnmaskingRollouts | UnmaskingDemonstrations = config.section("unmasking")
    parts = load_parts(path, settings, config, MaskedPolicy.kind, lambda tokenizer: mask_token_id(tokenizer, settings))
    try:
        check_shift(unmasking, shifted=parts.scorer.shifted)
    except ValueError as error:
        raise UserError(f"model.path={path}: {error}") from None
    if isinstance(config.needs.critic, SharedCritic):
        parts.scorer.critic = critic_of(transformers_model(parts.scorer.model), config.needs.critic, Path(path))
    return MaskedPolicy(*parts, unmasking, unmasking.likelihood)


def load_uniform(path: str, settings: UniformModel, config: JobConfig) -> UniformPolicy:
    """Loads the uniform diffusion policy of a job. Raises UserError as `load_parts` does."""
    noising: Noising = config.section("noising")
    return UniformPolicy(*load_parts(path, settings, config, UniformPolicy.kind, lambda tokenizer: NO_MASK), noising)


class PolicyParts(NamedTuple):
    """The arguments that all discrete diffusion policies need."""

    scorer: MaskScorer
    layout: ResponseLayout
    options: TokenDiffusionOptions


def load_parts(
    path: str, settings: TokenDiffusionModel, config: JobConfig, kind: str, mask: Callable[[Tokenizer], int]
) -> PolicyParts:
    """Loads the model and tokenizer at `path`, and its codebook of image tokens if there is one.

    kind: the value of `model.type`. mask: returns the id of the mask token. Raises UserError if there is no language
    model at `path`, or if its context or codebook does not fit the lengths in `rollout`.
    """
    limits: MaskedLimits = config.rollout
    model_config = load_config(path)
    causal = type(model_config) not in MODEL_FOR_MASKED_LM_MAPPING
    if causal and type(model_config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(
            f"model.path={path} is a model of type {model_config.model_type}, which does not write text; take a "
            "language model of transformers"
        )
    model_class = AutoModelForCausalLM if causal else AutoModelForMaskedLM
    core = load_pretrained(model_class, path, settings.dtype, settings.attention)
    context = model_config.get_text_config().max_position_embeddings
    text = limits.reasoning_length if isinstance(limits, WritingLimits) else 0
    length = text + limits.response_length
    if length >= context:
        text_part = f"with rollout.reasoning_length={text} before it " if text else ""
        raise UserError(
            f"rollout.response_length={limits.response_length} {text_part}leaves no room for a prompt in the context "
            f"of model.path={path}, {context} tokens; lower rollout.response_length"
        )
    model = adapt(core, path, freeze=(), lora=settings.lora)
    if settings.activation_checkpointing:
        recompute_activations(model)
    tokenizer, image_codebook = load_tokenizer(path), codebook.read(path)
    if text and image_codebook is None:
        raise UserError(
            f"rollout.reasoning_length={text} is for text before an image, but model.path={path} has no codebook and "
            "generates text alone; remove that key, and set rollout.response_length to the length of the text"
        )
    if image_codebook is not None and image_codebook.tokens_per_image != limits.response_length:
        raise UserError(
            f"rollout.response_length={limits.response_length}, but model.path={path} generates images of "
            f"{image_codebook.tokens_per_image} tokens; set it to {image_codebook.tokens_per_image}"
        )
    vocabulary_size = transformers_model(model).get_output_embeddings().weight.shape[0]
    vocabulary = build_vocabulary(tokenizer, mask(tokenizer), vocabulary_size, image_codebook, text=text > 0)
    layout = ResponseLayout(
        kind,
        tokenizer,
        vocabulary,
        length=length,
        max_prompt_length=min(limits.max_prompt_length, context - length),
        codebook=image_codebook,
        reasoning_length=text,
    )
    # mmrl convert writes this key; a model without it predicts the token at each position
    declared: bool = model_config.to_dict().get(SHIFTED, False)
    shifted = declared if settings.shifted is None else settings.shifted
    options = TokenDiffusionOptions(
        temperature=limits.temperature if isinstance(limits, MaskedSampling) else constant(1.0),
        evaluation_temperature=config.evaluation.temperature,
        keeps_distributions="distribution" in config.needs.offers,
    )
    return PolicyParts(MaskScorer(model, vocabulary, causal=causal, shifted=shifted), layout, options)


def mask_token_id(tokenizer: Tokenizer, settings: MaskedModel) -> int:
    """Returns the id of the mask token. Raises UserError if the tokenizer has none, or does not know
    `model.mask_token`."""
    mask = tokenizer.mask_token_id
    if settings.mask_token is not None:
        mask = tokenizer.get_vocab().get(settings.mask_token)
    if mask is None:
        problem = (
            "the tokenizer of model.path has no mask token"
            if settings.mask_token is None
            else f"model.mask_token={settings.mask_token} is not in the vocabulary of model.path"
        )
        raise UserError(f"{problem}; set model.mask_token to the text of the model's mask token")
    return int(mask)


def build_vocabulary(
    tokenizer: Tokenizer, mask: int, size: int, image_codebook: Codebook | None, *, text: bool = False
) -> Vocabulary:
    """Returns the special tokens of a policy, and the tokens that it never samples.

    Never sampled in text: special tokens other than the end, image tokens, and ids beyond the tokenizer's vocabulary.
    Never sampled in images: tokens that are not in the codebook. mask: id of the mask token. size: rows of the output
    layer. text: responses of a model with a codebook have text before the image. Raises UserError if there is no end
    token for a text.
    """
    if image_codebook is not None and not text:
        return Vocabulary(mask, tokenizer.pad_token_id or 0, None, image_codebook.non_code_tokens(size))
    end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
    if end is None:
        raise UserError(
            "the tokenizer of model.path has no end token; set eos_token or sep_token in its tokenizer_config.json"
        )
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    not_text = set(range(len(tokenizer), size))
    if image_codebook is not None:
        not_text |= set(range(image_codebook.first, image_codebook.first + len(image_codebook.patches)))
    # NO_MASK stands for a missing mask token and is no id
    suppressed = sorted((special | {mask} | not_text) - {end, NO_MASK})
    pad = end if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    image_suppressed = None if image_codebook is None else image_codebook.non_code_tokens(size)
    return Vocabulary(mask, pad, end, torch.tensor(suppressed), image_suppressed)

"""Estimates the memory of training and sampling autoregressive image models, by running them on the meta device."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import peft
import torch
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    JanusConfig,
    JanusForConditionalGeneration,
    PreTrainedConfig,
)

from mmrl.engine.memory import MemoryModel, on_meta
from mmrl.errors import UserError
from mmrl.policies import codebook
from mmrl.policies.autoregressive_image.settings import (
    AutoregressiveImageModel,
    ImageTokenDemonstrations,
    ImageTokenDrawing,
    ImageTokenLimits,
)
from mmrl.policies.autoregressive_image.writers import AT_ONCE, core_of, freeze_untrained
from mmrl.policies.vlm.loading import adapt, load_config, recompute_activations
from mmrl.policies.vlm.memory_estimate import head_size, last_hidden

if TYPE_CHECKING:
    from mmrl.protocols.job import JobConfig

# Sizes of published models, so that they need no download.
LLAMA: dict[str, Any] = {"model_type": "llama", "vocab_size": 102400, "max_position_embeddings": 16384}
PUBLISHED: dict[str, dict[str, Any]] = {
    "deepseek-community/Janus-Pro-1B": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
    },
    "deepseek-community/Janus-Pro-7B": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 30,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
    },
}


def model_config(path: str) -> PreTrainedConfig:
    """Returns the configuration of a model, without a download for a model in PUBLISHED. Raises UserError as
    `load_config` does."""
    if path not in PUBLISHED:
        return load_config(path)
    text = PUBLISHED[path]
    width = text["hidden_size"]
    return JanusConfig(
        text_config={**LLAMA, **text},
        vision_config={"projection_dim": width},
        vq_config={"projection_dim": width, "image_token_embed_dim": width},
        tie_word_embeddings=False,
    )


def network(settings: AutoregressiveImageModel, path: str) -> nn.Module:
    """Builds the model that `loading.load` would load, on the meta device, without weights. Raises UserError for a
    model of another type."""
    config = model_config(path)
    if not isinstance(config, JanusConfig) and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(
            f"model.path={path} is a model of type {config.model_type}, which does not generate token by token; take "
            "a causal language model with a codebook, or Janus"
        )
    lora, base = settings.lora, path
    with on_meta(settings.dtype):
        if isinstance(config, JanusConfig):
            model: nn.Module = JanusForConditionalGeneration._from_config(config, attn_implementation="sdpa")
        else:
            model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        if (Path(path) / "adapter_config.json").is_file():
            model, lora = peft.get_peft_model(model, peft.PeftConfig.from_pretrained(path)), None
            base = ""  # the LoRA at `path` is in the model already: `adapt` must not load it
        model = adapt(model, base, freeze=(), lora=lora)
    freeze_untrained(model)
    if settings.activation_checkpointing:
        recompute_activations(model)
    model = model.to(getattr(torch, settings.dtype))
    model.train()
    return model


def memory_model(settings: AutoregressiveImageModel, config: JobConfig, path: str) -> MemoryModel:
    """Returns the network and the passes whose memory is estimated, for prompts and texts of maximum length. Raises
    UserError as `network` does, and for a causal language model without a codebook."""
    limits: ImageTokenLimits = config.rollout
    drawing: ImageTokenDrawing = config.section("drawing")
    model = network(settings, path)
    core = core_of(model)
    is_janus = isinstance(core.config, JanusConfig)
    text = core.config.get_text_config()
    if is_janus:
        image_tokens = core.config.vq_config.num_patches**2
    else:
        book = codebook.read(path)
        if book is None:
            raise UserError(
                f"model.path={path} has no {codebook.NAME}.safetensors, which gives the number of tokens of an image; "
                "add this file"
            )
        image_tokens = book.tokens_per_image
    begin_tokens = 1 if is_janus else 0  # Janus has a begin-of-image token
    max_length = limits.max_prompt_length + limits.reasoning_length + begin_tokens + image_tokens
    # Rows per image: with guidance there is an unconditional one too
    branches = 1 if isinstance(drawing, ImageTokenDemonstrations) or drawing.guidance == 1 else 2
    at_once = min(config.rollouts_per_step, config.rollout.generated_at_once or config.rollouts_per_step)
    bytes_per_number = torch.empty(0, dtype=getattr(torch, settings.dtype)).element_size()

    def train(rows: int) -> tuple[Tensor, Tensor]:
        """Runs a training forward pass of `rows` rollouts. Returns the guided logits of image tokens, and the logits
        of text (of image tokens again, if there is no text)."""
        hidden = last_hidden(model, branches * rows, max_length, requires_grad=settings.lora is None)
        head = core.model.generation_head if is_janus else core.lm_head
        conditional, *unconditional = head(hidden[:, -image_tokens:]).float().chunk(branches)
        logits = (
            unconditional[0] + drawing.guidance * (conditional - unconditional[0]) if unconditional else conditional
        )
        text_logits = (
            core.lm_head(hidden[:rows, : limits.reasoning_length]).float() if limits.reasoning_length else logits
        )
        return logits, text_logits

    def sample() -> Tensor:
        """Runs the prefill of a batch of images, and decodes image tokens to pixels."""
        hidden = last_hidden(
            model, branches * at_once, limits.max_prompt_length + limits.reasoning_length, requires_grad=False
        )
        if is_janus:
            core.model.vqmodel.decode(torch.zeros(min(AT_ONCE, at_once), image_tokens, dtype=torch.long, device="meta"))
        return hidden

    heads = text.num_key_value_heads or text.num_attention_heads
    return MemoryModel(
        model,
        train,
        sample=sample,
        cache=2.0  # keys and values
        * bytes_per_number
        * text.num_hidden_layers
        * heads
        * head_size(text)
        * max_length
        * branches
        * at_once,
        notes=[
            f"a micro-batch is {config.engine.micro_batch} x {branches} rows of up to {max_length} tokens, "
            f"{image_tokens} are image tokens"
        ],
    )

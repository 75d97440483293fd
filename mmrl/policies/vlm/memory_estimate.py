"""Estimates the memory of training and sampling vision-language models, by running them on the meta device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import peft
import torch
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, PreTrainedConfig, Qwen2_5_VLConfig

from mmrl.engine.memory import MemoryModel, full_attention_mask, on_meta
from mmrl.generation.settings import VLLMGenerator
from mmrl.policies.settings import LoRA
from mmrl.policies.vlm.loading import adapt, load_config, part_of, recompute_activations
from mmrl.policies.vlm.scorer import transformers_model
from mmrl.policies.vlm.settings import TokenEngine, TokenLimits, TokenSampling, VisionLanguageModel

if TYPE_CHECKING:
    from mmrl.protocols.job import JobConfig

# Bytes of activations that a transformer layer keeps per token and unit of hidden size, at two bytes per number (arXiv
# 2205.05198, table 2)
LAYER_BYTES = 34
QWEN_VISION: dict[str, Any] = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16}
QWEN_VISION |= {"fullatt_block_indexes": [7, 15, 23, 31]}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}}
# Sizes of published models, so that they need no download.
PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen/Qwen2.5-VL-3B-Instruct": {
        "hidden_size": 2048,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "intermediate_size": 11008,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen2.5-VL-7B-Instruct": {
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
}


def model_config(path: str) -> PreTrainedConfig:
    """Returns the configuration of a transformers model, without a download for a model in PUBLISHED. Raises UserError
    as `load_config`."""
    if path not in PUBLISHED:
        return load_config(path)
    text = PUBLISHED[path]
    vision = {**QWEN_VISION, "out_hidden_size": text["hidden_size"]}
    tied = text["tie_word_embeddings"]
    return Qwen2_5_VLConfig(text_config={**text, **ROPE}, vision_config=vision, tie_word_embeddings=tied)


def network(path: str, *, dtype: str, freeze: Sequence[str], lora: LoRA | None) -> nn.Module:
    """Builds the model that `loading.load_model` would load, with its LoRA, on the meta device, which holds no
    weights."""
    with on_meta(dtype):
        model: nn.Module = AutoModelForImageTextToText.from_config(model_config(path), attn_implementation="sdpa")
        if (Path(path) / "adapter_config.json").is_file():
            model, lora = peft.get_peft_model(model, peft.PeftConfig.from_pretrained(path)), None
            path = ""  # the LoRA at `path` is in the model already: `adapt` must not load it
        model = adapt(model, path, freeze=freeze, lora=lora)
    return model.to(getattr(torch, dtype))


def decoder(model: nn.Module) -> Any:
    """Returns the text decoder of a model."""
    return transformers_model(model).get_decoder()


def last_hidden(model: nn.Module, rows: int, length: int, *, requires_grad: bool) -> Tensor:
    """Runs the decoder on the meta device; returns last hidden states [rows, length, hidden size]. requires_grad:
    whether the input embeddings require a gradient."""
    core = decoder(model)
    dtype = next(model.parameters()).dtype
    width = core.get_input_embeddings().embedding_dim
    tokens = torch.empty(rows, length, width, device="meta", dtype=dtype, requires_grad=requires_grad)
    mask = full_attention_mask(rows, length)
    # Multimodal rotary embeddings (mrope) take positions in time, height and width.
    position_ids = torch.zeros(3, rows, length, dtype=torch.long, device="meta")
    options = {"position_ids": position_ids} if "mrope_section" in str(core.config.to_dict()) else {}
    out: Tensor = core(inputs_embeds=tokens, attention_mask=mask, use_cache=False, **options).last_hidden_state
    return out


def memory_model(settings: VisionLanguageModel, config: JobConfig, path: str) -> MemoryModel:
    """Returns the network and the passes whose memory is estimated, for prompts (image tokens included) and responses
    of maximum length. Raises UserError as `load_config`."""
    rollout: TokenLimits = config.rollout
    engine: TokenEngine = config.engine
    model = network(path, dtype=settings.dtype, freeze=list(settings.freeze), lora=settings.lora)
    if settings.activation_checkpointing:
        recompute_activations(model)
    model.train()
    response = int(rollout.max_response_length.extremes[1])  # the largest value of all steps
    length = rollout.max_prompt_length + response
    core = decoder(model)
    text, bytes_per_number = core.config, torch.empty(0, dtype=getattr(torch, settings.dtype)).element_size()
    at_once = min(config.rollouts_per_step, config.rollout.generated_at_once or config.rollouts_per_step)
    # Under ZeRO-3 each response has its own prefill; otherwise the responses of a group share one.
    rows_per_prompt = config.group_size if config.engine.zero_stage < 3 else 1
    batch_rows = engine.max_rows(config.engine.micro_batch, length)
    notes = [f"a micro-batch is {batch_rows} responses of up to {length} tokens, prompts included"]

    def train(rows: int) -> Tensor:
        """Runs the forward pass of a micro-batch of at most `rows` responses."""
        frozen = settings.lora is None and "language" in settings.freeze
        return last_hidden(model, engine.max_rows(rows, length), length, requires_grad=not frozen)

    memory = MemoryModel(
        model,
        train,
        sample=lambda: last_hidden(
            model, max(1, at_once // rows_per_prompt), rollout.max_prompt_length, requires_grad=False
        ),
        logits=engine.logp_chunk * text.vocab_size * 4 * 2,  # fp32, and their gradient
        notes=notes,
    )
    if any(p.requires_grad for n, p in model.named_parameters() if part_of(n) == "vision"):
        memory.training_parts["activations of images"] = image_activations(model, batch_rows, rollout, settings)
        notes.append(f"activations of images: {LAYER_BYTES} bytes x tokens x hidden size x layers (arXiv 2205.05198)")
    colocated = isinstance(rollout, TokenSampling) and isinstance(rollout.generator, VLLMGenerator)
    if isinstance(rollout, TokenSampling) and not colocated:
        heads = text.num_key_value_heads or text.num_attention_heads
        # 2: keys and values
        memory.cache = 2 * bytes_per_number * text.num_hidden_layers * heads * head_size(text) * length * at_once
    if colocated:  # vLLM samples, with memory of its own
        memory.sample = None
    return memory


def head_size(text: PreTrainedConfig) -> int:
    """Returns the head dimension, which only some families have in their configuration."""
    return text.to_dict().get("head_dim") or text.hidden_size // text.num_attention_heads


def image_activations(model: nn.Module, rows: int, rollout: TokenLimits, settings: VisionLanguageModel) -> float:
    """Returns the bytes of activations of a trained vision tower for one micro-batch.

    It is an upper bound: prompts consist of image tokens only, with four patches per token as in Qwen's towers.
    """
    vision = transformers_model(model).config.vision_config
    depth = vision.to_dict().get("depth") or vision.num_hidden_layers
    patches = rows * rollout.max_prompt_length * 4
    per_layer = 2 if settings.activation_checkpointing else LAYER_BYTES  # 2: only the input of a layer is kept
    # the second term: one layer in full, which checkpointing recomputes
    return float(per_layer * patches * vision.hidden_size * depth + LAYER_BYTES * patches * vision.hidden_size)

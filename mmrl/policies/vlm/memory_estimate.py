"""Vision-language models on the meta device: what a micro-batch of tokens and a batch of responses take."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import peft
import torch
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, PreTrainedConfig, Qwen2_5_VLConfig

from mmrl.engine.memory import MemoryModel, everything_seen, on_meta
from mmrl.generation.settings import VLLMGenerator
from mmrl.policies.settings import LoRA
from mmrl.policies.vlm.loading import adapt, described, part_of, recompute_activations
from mmrl.policies.vlm.scorer import transformers_model
from mmrl.policies.vlm.settings import TokenEngine, TokenLimits, TokenSampling, VisionLanguageModel

if TYPE_CHECKING:
    from mmrl.protocols.job import JobConfig

A_LAYER = 34  # numbers of a vision token's width that a layer keeps, of two bytes each (arXiv 2205.05198, table 2)
QWEN_VISION: dict[str, Any] = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16}
QWEN_VISION |= {"fullatt_block_indexes": [7, 15, 23, 31]}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}}
# Sizes of published models, so that nothing is asked of a hub.
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


def described_model(path: str) -> PreTrainedConfig:
    """The configuration of a transformers model, from this file where it is a published one. Raises UserError."""
    if path not in PUBLISHED:
        return described(path)
    text = PUBLISHED[path]
    vision = {**QWEN_VISION, "out_hidden_size": text["hidden_size"]}
    tied = text["tie_word_embeddings"]
    return Qwen2_5_VLConfig(text_config={**text, **ROPE}, vision_config=vision, tie_word_embeddings=tied)


def network(path: str, *, dtype: str, freeze: Sequence[str], lora: LoRA | None) -> nn.Module:
    """The image-text model at `path`, or the one that the adapter there belongs to, as `loading.load_model` makes it,
    without weights."""
    made: Any = AutoModelForImageTextToText
    with on_meta(dtype):
        model = made.from_config(described_model(path), attn_implementation="sdpa")
        if (Path(path) / "adapter_config.json").is_file():
            model, lora = peft.get_peft_model(model, peft.PeftConfig.from_pretrained(path)), None
            path = ""
        model = adapt(model, path, freeze=freeze, lora=lora)
    return model.to(getattr(torch, dtype))


def decoder(model: nn.Module) -> Any:
    """The layers that read words."""
    return transformers_model(model).get_decoder()


def read(model: nn.Module, rows: int, length: int, *, given: bool) -> Tensor:
    """The last layer [row, token, width] of so many tokens. given: whether what they are embedded as asks for a
    gradient."""
    core = decoder(model)
    dtype = next(model.parameters()).dtype
    width = core.get_input_embeddings().embedding_dim
    tokens = torch.empty(rows, length, width, device="meta", dtype=dtype, requires_grad=given)
    mask = everything_seen(rows, length)
    places = torch.zeros(3, rows, length, dtype=torch.long, device="meta")
    with_places = {"position_ids": places} if "mrope_section" in str(core.config.to_dict()) else {}
    out: Tensor = core(inputs_embeds=tokens, attention_mask=mask, use_cache=False, **with_places).last_hidden_state
    return out


def memory_model(settings: VisionLanguageModel, config: JobConfig, path: str) -> MemoryModel:
    """Of a job; what is read of an image counts as tokens of the prompt. Raises UserError as `described`."""
    rollout: TokenLimits = config.rollout
    engine: TokenEngine = config.engine
    model = network(path, dtype=settings.dtype, freeze=list(settings.freeze), lora=settings.lora)
    if settings.activation_checkpointing:
        recompute_activations(model)
    model.train()
    response = int(rollout.max_response_length.extremes[1])
    length = rollout.max_prompt_length + response
    core = decoder(model)
    text, width = core.config, torch.empty(0, dtype=getattr(torch, settings.dtype)).element_size()
    at_once = min(config.rollouts_per_step, config.rollout.generated_at_once or config.rollouts_per_step)
    shared = config.group_size if config.engine.zero_stage < 3 else 1
    together = engine.longest_at_once(config.engine.micro_batch, length)
    words = [f"a micro-batch is {together} responses of up to {length} tokens, prompts included"]

    def train(rows: int) -> Tensor:
        words_given = settings.lora is None and "language" in settings.freeze
        return read(model, engine.longest_at_once(rows, length), length, given=not words_given)

    made = MemoryModel(
        model,
        train,
        sample=lambda: read(model, max(1, at_once // shared), rollout.max_prompt_length, given=False),
        logits=engine.logp_chunk * text.vocab_size * 4 * 2,  # fp32, and their gradient
        words=words,
    )
    if any(p.requires_grad for n, p in model.named_parameters() if part_of(n) == "vision"):
        made.beside_training["activations of images"] = images(model, together, rollout, settings)
        words.append(f"of images by the formula {A_LAYER} x tokens x width x layers (arXiv 2205.05198)")
    colocated = isinstance(rollout, TokenSampling) and isinstance(rollout.generator, VLLMGenerator)
    if isinstance(rollout, TokenSampling) and not colocated:
        heads = text.num_key_value_heads or text.num_attention_heads
        made.cache = 2 * width * text.num_hidden_layers * heads * head_size(text) * length * at_once
    if colocated:
        made.sample = None
    return made


def head_size(text: PreTrainedConfig) -> int:
    """Numbers of a key, which only some families name."""
    return text.to_dict().get("head_dim") or text.hidden_size // text.num_attention_heads


def images(model: nn.Module, rows: int, rollout: TokenLimits, settings: VisionLanguageModel) -> float:
    """Bytes that a vision tower which is trained keeps of the images of a micro-batch, of at most as many tokens as a
    prompt has; four patches are one of them in Qwen's towers, which is the most among those known here."""
    vision = transformers_model(model).config.vision_config
    depth = vision.to_dict().get("depth") or vision.num_hidden_layers
    patches = rows * rollout.max_prompt_length * 4
    kept = 2 if settings.activation_checkpointing else A_LAYER
    return float(kept * patches * vision.hidden_size * depth + A_LAYER * patches * vision.hidden_size)

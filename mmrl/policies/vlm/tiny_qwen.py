"""Tiny models with random weights, of the Qwen2.5-VL (arXiv 2502.13923) and Qwen3-VL (arXiv 2511.21631) architectures,
for CPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

INITIALIZER_RANGE = (
    0.08  # about 1 / sqrt(width); with the usual 0.02 a model this narrow learns from images far more slowly
)
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Sizes:
    """Sizes of a tiny model. The head dimension is 32, the smallest that vLLM's CPU attention supports.

    Qwen2.5-VL has only relative positions in an image. Qwen3-VL also learns absolute positions, which a small model
    needs to locate objects.
    """

    generation: Literal["2.5", "3"] = "2.5"  # Qwen2.5-VL or Qwen3-VL
    patch: int = 8  # side of a patch, in pixels
    merge: int = 1  # patches that become one token, along each side
    max_patches: int = 64  # of an image
    width: int = 128
    layers: int = 3
    vision_width: int = 64
    vision_layers: int = 2
    rope: tuple[int, int, int] = (2, 2, 12)  # rotary frequencies for time, height and width
    # standard deviation of the initial weights of the vision tower; None: INITIALIZER_RANGE in Qwen2.5-VL, the default
    # of transformers in Qwen3-VL
    vision_init_std: float | None = None
    # side of the windows of the vision attention of Qwen2.5-VL, in pixels; None: attention over the full image
    window: int | None = None


def train_tokenizer(corpus: Sequence[str], entries: int, *, digits_apart: bool = True) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer with at most `entries` tokens on `corpus`. digits_apart: each decimal digit is
    a token of its own, so '14' becomes '1' and '4'."""
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits_then_bytes = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    tokenizer.pre_tokenizer = digits_then_bytes if digits_apart else byte_level
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=entries,
        min_frequency=2,
        special_tokens=[PAD, START, END, *VISION],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return fast_tokenizer(tokenizer, 512)


def fast_tokenizer(tokenizer: Tokenizer, length: int, **special_tokens: str) -> PreTrainedTokenizerFast:
    """Wraps a tokenizer with Qwen's special tokens. length: number of tokens of the longest input. special_tokens:
    further special tokens by name, such as bos_token."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[START, *VISION],
        padding_side="left",
        model_max_length=length,
        **special_tokens,
    )


def build_processor(tokenizer: PreTrainedTokenizerFast, sizes: Sizes) -> Qwen2_5_VLProcessor | Qwen3VLProcessor:
    """Builds a processor. It does not resize an image of at most `max_patches` patches whose sides are multiples of
    patch * merge pixels."""
    patches = {"patch_size": sizes.patch, "merge_size": sizes.merge, "temporal_patch_size": 2}
    area = sizes.patch**2
    # Despite their names these are numbers of pixels of an image
    size = {"shortest_edge": area * sizes.merge**2, "longest_edge": sizes.max_patches * area}
    processor_class, video_class = (
        (Qwen2_5_VLProcessor, Qwen2VLVideoProcessor)
        if sizes.generation == "2.5"
        else (Qwen3VLProcessor, Qwen3VLVideoProcessor)
    )
    images = Qwen2VLImageProcessor(size=size, **patches)
    return processor_class(
        image_processor=images,
        # vLLM normalises videos with the mean and standard deviation of images
        video_processor=video_class(size=size, image_mean=images.image_mean, image_std=images.image_std, **patches),
        tokenizer=tokenizer,
        chat_template=CHAT_TEMPLATE,
    )


def build_config(tokenizer: PreTrainedTokenizerFast, sizes: Sizes) -> Qwen2_5_VLConfig | Qwen3VLConfig:
    """Returns the configuration of a tiny Qwen2.5-VL or Qwen3-VL with the tokenizer's vision tokens."""
    ids: list[Any] = [tokenizer.convert_tokens_to_ids(token) for token in VISION]
    vision_start, vision_end, image, video = ids
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    # Images are a few tokens wide: with a larger theta neighbours would have nearly the same phase.
    rope = {"rope_type": "default", "rope_theta": 10.0, "mrope_section": list(sizes.rope)}
    config: type[Qwen2_5_VLConfig] | type[Qwen3VLConfig]
    text: dict[str, Any]
    vision: dict[str, Any]
    vision_init: dict[str, Any] = {} if sizes.vision_init_std is None else {"initializer_range": sizes.vision_init_std}
    if sizes.generation == "2.5":
        config, text = Qwen2_5_VLConfig, {"rope_parameters": rope}
        full_attention = list(range(sizes.vision_layers)) if sizes.window is None else []
        vision = {"window_size": sizes.window or 64, "fullatt_block_indexes": full_attention}
        vision |= {"initializer_range": INITIALIZER_RANGE}
    else:
        config, text = Qwen3VLConfig, {"rope_parameters": {**rope, "mrope_interleaved": True}, "head_dim": 32}
        vision = {"num_position_embeddings": sizes.max_patches, "deepstack_visual_indexes": [0]}
    return config(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": sizes.width,
            "intermediate_size": 2 * sizes.width,
            "num_hidden_layers": sizes.layers,
            "num_attention_heads": sizes.width // 32,
            "num_key_value_heads": max(1, sizes.width // 64),
            "max_position_embeddings": 512,
            "tie_word_embeddings": True,
            "initializer_range": INITIALIZER_RANGE,
            **text,
            **special,
        },
        vision_config={
            "depth": sizes.vision_layers,
            "hidden_size": sizes.vision_width,
            "intermediate_size": 2 * sizes.vision_width,
            "num_heads": sizes.vision_width // 32,
            "out_hidden_size": sizes.width,
            "patch_size": sizes.patch,
            "spatial_merge_size": sizes.merge,
            "temporal_patch_size": 2,
            **vision,
            **vision_init,
        },
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=vision_start,
        vision_end_token_id=vision_end,
        tie_word_embeddings=True,
        **special,
    )


def write(path: str | Path, tokenizer: PreTrainedTokenizerFast, sizes: Sizes, seed: int) -> None:
    """Saves a model with random weights, its processor and generation config, for the Auto classes of transformers.

    seed: determines the weights. The global random state of torch does not change.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model_class = (
            Qwen2_5_VLForConditionalGeneration if sizes.generation == "2.5" else Qwen3VLForConditionalGeneration
        )
        model = model_class(build_config(tokenizer, sizes))
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True
    )
    model.save_pretrained(path)
    build_processor(tokenizer, sizes).save_pretrained(path)

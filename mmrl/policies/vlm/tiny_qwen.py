"""A Qwen2.5-VL (arXiv 2502.13923) or Qwen3-VL (arXiv 2511.21631) small enough for a laptop's CPU, built in code."""

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

INITIALIZER_RANGE = 0.08  # about 1 / sqrt(width): at the usual 0.02 so narrow a model learns to see far more slowly
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
    """Sizes of a tiny model. Heads are 32 wide, the smallest that vLLM's CPU attention takes.

    Generation 2.5 knows only relative positions in an image; generation 3 also learns absolute ones, which a small
    model needs to tell where something is.
    """

    generation: Literal["2.5", "3"] = "2.5"
    patch: int = 8  # pixels
    merge: int = 1  # patches that become one token, along each side
    longest: int = 64  # patches in an image
    width: int = 128
    layers: int = 3
    vision_width: int = 64
    vision_layers: int = 2
    rope: tuple[int, int, int] = (2, 2, 12)  # frequencies for time, height and width
    spread: float | None = (
        None  # standard deviation of the vision half's weights; None: the family's own of generation 3
    )
    # pixels, along each side, of the squares within which the vision half of generation 2.5 attends; None: everywhere
    window: int | None = None


def byte_pairs(corpus: Sequence[str], entries: int, *, digits_apart: bool = True) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE of at most so many entries on `corpus`. digits_apart: every decimal digit is a token of
    its own, so '14' is '1' and '4'."""
    tokenizer = Tokenizer(models.BPE())
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False)
    apart = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), bytes_])
    tokenizer.pre_tokenizer = apart if digits_apart else bytes_
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


def fast_tokenizer(tokenizer: Tokenizer, length: int, **more: str) -> PreTrainedTokenizerFast:
    """Wraps a tokenizer with the special tokens of the family; `more` names further ones."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[START, *VISION],
        padding_side="left",
        model_max_length=length,
        **more,
    )


def build_processor(tokenizer: PreTrainedTokenizerFast, sizes: Sizes) -> Qwen2_5_VLProcessor | Qwen3VLProcessor:
    """Builds a processor. Images keep their size wherever both sides are multiples of patch * merge pixels and have at
    most `longest` patches together."""
    patches = {"patch_size": sizes.patch, "merge_size": sizes.merge, "temporal_patch_size": 2}
    area = sizes.patch**2  # sizes are in pixels of the whole image
    size = {"shortest_edge": area * sizes.merge**2, "longest_edge": sizes.longest * area}
    processor_class, video_class = (
        (Qwen2_5_VLProcessor, Qwen2VLVideoProcessor)
        if sizes.generation == "2.5"
        else (Qwen3VLProcessor, Qwen3VLVideoProcessor)
    )
    images = Qwen2VLImageProcessor(size=size, **patches)
    return processor_class(
        image_processor=images,
        # vLLM normalises videos by the mean and deviation of images
        video_processor=video_class(size=size, image_mean=images.image_mean, image_std=images.image_std, **patches),
        tokenizer=tokenizer,
        chat_template=CHAT_TEMPLATE,
    )


def build_config(tokenizer: PreTrainedTokenizerFast, sizes: Sizes) -> Qwen2_5_VLConfig | Qwen3VLConfig:
    """Returns the configuration of a tiny Qwen2.5-VL or Qwen3-VL with the tokenizer's vision tokens."""
    ids: list[Any] = [tokenizer.convert_tokens_to_ids(token) for token in VISION]
    vision_start, vision_end, image, video = ids
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    # Rows are a few tokens wide: no frequency may be so slow that neighbours get the same phase.
    rope = {"rope_type": "default", "rope_theta": 10.0, "mrope_section": list(sizes.rope)}
    config: type[Qwen2_5_VLConfig] | type[Qwen3VLConfig]
    text: dict[str, Any]
    vision: dict[str, Any]
    spread: dict[str, Any] = {} if sizes.spread is None else {"initializer_range": sizes.spread}
    if sizes.generation == "2.5":
        config, text = Qwen2_5_VLConfig, {"rope_parameters": rope}
        everywhere = list(range(sizes.vision_layers)) if sizes.window is None else []
        vision = {"window_size": sizes.window or 64, "fullatt_block_indexes": everywhere}
        vision |= {"initializer_range": INITIALIZER_RANGE}
    else:
        config, text = Qwen3VLConfig, {"rope_parameters": {**rope, "mrope_interleaved": True}, "head_dim": 32}
        vision = {"num_position_embeddings": sizes.longest, "deepstack_visual_indexes": [0]}
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
            **spread,
        },
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=vision_start,
        vision_end_token_id=vision_end,
        tie_word_embeddings=True,
        **special,
    )


def write(path: str | Path, tokenizer: PreTrainedTokenizerFast, sizes: Sizes, seed: int) -> None:
    """Saves model, processor and generation config into a folder that transformers' Auto classes load offline.

    The weights are random, the same for the same seed; torch's global generator is left as it was.
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

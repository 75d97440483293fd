"""A vision-language model small enough to train on a laptop's CPU, built from a configuration: no download.

It is a Qwen2.5-VL (Bai et al. 2025, arXiv:2502.13923) whose 8-pixel patches are the cells of a digits canvas, so a
handwritten digit is one image token, with a tokenizer trained on the questions and answers of `DigitsSource`.

    python -m tasks.visual_qa.tiny_model PATH [--seed 0]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

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
)

from tasks.visual_qa.digits import CELL, DigitsSource

VOCABULARY = 512
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


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of at most 512 entries; every decimal digit is a token of its own, so '14' is '1' and '4'."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    source = DigitsSource("train", size=1000, seed=0)
    prompts = [source[index] for index in range(len(source))]
    corpus = [prompt.text for prompt in prompts] + [prompt.answer for prompt in prompts]
    corpus += [f"{role}\n" for role in ("system", "user", "assistant")] * 10
    corpus += ["<think>", "</think>", "<answer>", "</answer>"] * 10
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        min_frequency=2,
        special_tokens=[PAD, START, END, *VISION],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[START, *VISION],
        padding_side="left",
        model_max_length=512,
    )


def build_processor() -> Qwen2_5_VLProcessor:
    """Pictures keep their size wherever both sides are multiples of 8 pixels and the whole is at most 64 cells."""
    patches = {"patch_size": CELL, "merge_size": 1, "temporal_patch_size": 2}
    size = {"shortest_edge": CELL * CELL, "longest_edge": 64 * CELL * CELL}  # in pixels of the whole picture
    return Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=size, **patches),
        video_processor=Qwen2VLVideoProcessor(size=size, **patches),
        tokenizer=build_tokenizer(),
        chat_template=CHAT_TEMPLATE,
    )


def build_config(tokenizer: PreTrainedTokenizerFast) -> Qwen2_5_VLConfig:
    """About 0.7M parameters; heads of 32, the smallest that vLLM's CPU attention takes."""
    ids: list[Any] = [tokenizer.convert_tokens_to_ids(token) for token in VISION]
    vision_start, vision_end, image, video = ids
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    return Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            # Rows are a few cells wide: most frequencies go to the width, none so slow that neighbours look alike.
            "rope_parameters": {"rope_type": "default", "rope_theta": 10.0, "mrope_section": [2, 2, 12]},
            "tie_word_embeddings": True,
            "initializer_range": INITIALIZER_RANGE,
            **special,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "out_hidden_size": 128,
            "patch_size": CELL,
            "spatial_merge_size": 1,
            "temporal_patch_size": 2,
            "window_size": 64,
            "fullatt_block_indexes": [0, 1],
            "initializer_range": INITIALIZER_RANGE,
        },
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=vision_start,
        vision_end_token_id=vision_end,
        tie_word_embeddings=True,
        **special,
    )


def build(path: str | Path, seed: int = 0) -> None:
    """Writes model, processor and generation config to a folder that transformers' Auto classes load offline.

    The weights are random, the same for the same seed; torch's global generator is left as it was.
    """
    processor = build_processor()
    tokenizer = processor.tokenizer
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2_5_VLForConditionalGeneration(build_config(tokenizer))
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True
    )
    model.save_pretrained(path)
    processor.save_pretrained(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the tiny vision-language model of the digits task.")
    parser.add_argument("path", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    build(arguments.path, arguments.seed)

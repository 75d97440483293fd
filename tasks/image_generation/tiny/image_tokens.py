"""Tiny models that generate digits as image tokens of 2 x 2 pixels: autoregressive ones and a masked one."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    JanusConfig,
    JanusForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
)

from mmrl.policies import codebook
from mmrl.policies.diffusion import tiny
from mmrl.tasks.image_generation.data import digits

CODEBOOK_SIZE, PATCH = 128, 2  # number of image tokens; side of a patch in pixels
MASK = "<mask>"


def digit_codebook(first: int) -> codebook.Codebook:
    """Fits a codebook (a vector quantizer of image patches) to the training images. first: the id of its first
    token."""
    images = digits._digits()[0][torch.from_numpy(digits.split_indices("train"))]
    return codebook.fit(images, CODEBOOK_SIZE, PATCH, first)


def build_autoregressive(folder: str, seed: int) -> None:
    """Writes a randomly initialised Llama of 0.3M parameters, its tokenizer and a codebook of digits to a folder. seed:
    the random seed of the weights."""
    tokenizer = tiny.word_tokenizer(digits.words(), max_length=12)
    image_codebook = digit_codebook(len(tokenizer))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=image_codebook.first + CODEBOOK_SIZE,
            hidden_size=96,
            intermediate_size=192,
            num_hidden_layers=3,
            num_attention_heads=3,
            num_key_value_heads=3,
            max_position_embeddings=64,
            tie_word_embeddings=False,
            initializer_range=0.08,  # about 1 / sqrt(width)
        )
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    codebook.write(folder, image_codebook)


def build_masked(folder: str, seed: int) -> None:
    """Writes a randomly initialised BERT of 0.3M parameters, its tokenizer and a codebook of digits to a folder. seed:
    the random seed of the weights."""
    tokenizer = tiny.word_tokenizer(digits.words(), max_length=12)
    tokenizer.add_special_tokens({"mask_token": MASK})
    image_codebook = digit_codebook(len(tokenizer))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = BertConfig(
            vocab_size=image_codebook.first + CODEBOOK_SIZE,
            hidden_size=96,
            intermediate_size=192,
            num_hidden_layers=3,
            num_attention_heads=3,
            max_position_embeddings=32,
            type_vocab_size=1,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            initializer_range=0.08,
            pad_token_id=tokenizer.pad_token_id,
        )
        model = BertForMaskedLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    codebook.write(folder, image_codebook)


def build_janus(folder: str, seed: int) -> None:
    """Writes a randomly initialised Janus of transformers, which generates images of 3 x 8 x 8 as four tokens. seed:
    the random seed of the weights."""
    word_tokenizer = tiny.word_tokenizer(digits.words(), max_length=16)
    tokenizer: Any = type(word_tokenizer)(
        tokenizer_object=word_tokenizer._tokenizer,
        pad_token=tiny.PAD,
        unk_token=tiny.UNKNOWN,
        bos_token=tiny.START,
        eos_token=tiny.END,
        model_max_length=16,
        extra_special_tokens={"boi_token": "<begin>", "eoi_token": "<finish>", "image_token": "<image>"},
    )
    shared: dict[str, Any] = {"initializer_range": 0.08, "hidden_size": 32, "num_attention_heads": 2}
    config = JanusConfig(
        text_config={
            **shared,
            "model_type": "llama",
            "vocab_size": len(tokenizer),
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={**shared, "num_hidden_layers": 1, "image_size": 8, "patch_size": 4, "projection_dim": 32},
        vq_config={
            "embed_dim": 4,
            "num_embeddings": 24,
            "latent_channels": 32,
            "base_channels": 32,
            "channel_multiplier": [1, 1, 1],
            "num_res_blocks": 1,
            "projection_dim": 32,
            "image_token_embed_dim": 32,
            "initializer_range": 0.08,
        },
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = JanusForConditionalGeneration(config)
    model.generation_config.update(bos_token_id=tokenizer.bos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)

"""Tiny models that write digits as codes of 2 x 2 pixels, built in code: one token after the other, or in any order."""

from __future__ import annotations

from typing import Any

import torch
from mmrl.tasks.image_generation import digits
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

from mmrl.policies import codebook
from mmrl.policies.diffusion import tiny

CODES, PATCH = 128, 2
MASK = "<mask>"


def digit_codes(first: int) -> codebook.Codebook:
    """Of the pictures to train on. first: the token of code 0."""
    pictures = digits._digits()[0][torch.from_numpy(digits.split_indices("train"))]
    return codebook.trained(pictures, CODES, PATCH, first)


def build_autoregressive(folder: str, seed: int) -> None:
    """A Llama of 0.3M parameters."""
    tokenizer = tiny.word_tokenizer(digits.words(), max_length=12)
    codes = digit_codes(len(tokenizer))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=codes.first + CODES,
            hidden_size=96,
            intermediate_size=192,
            num_hidden_layers=3,
            num_attention_heads=3,
            num_key_value_heads=3,
            max_position_embeddings=64,
            tie_word_embeddings=False,
            initializer_range=0.08,  # about 1 / sqrt(width)
        )
        model: Any = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    codebook.write(folder, codes)


def build_masked(folder: str, seed: int) -> None:
    """A BERT of 0.3M parameters."""
    tokenizer = tiny.word_tokenizer(digits.words(), max_length=12)
    tokenizer.add_special_tokens({"mask_token": MASK})
    codes = digit_codes(len(tokenizer))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = BertConfig(
            vocab_size=codes.first + CODES,
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
        model: Any = BertForMaskedLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    codebook.write(folder, codes)

"""A tiny BERT of 0.2M parameters for sums: a masked language model whose class transformers has."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

from mmrl.tasks.text_sums.task import CHARACTERS

PAD, MASK, END, UNKNOWN = "<pad>", "<mask>", "<end>", "<unknown>"


def build_tokenizer(characters: str = CHARACTERS) -> PreTrainedTokenizerFast:
    """Builds a tokenizer with one token for each character."""
    vocabulary = {token: i for i, token in enumerate((PAD, MASK, END, UNKNOWN, *characters))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    special = {"pad_token": PAD, "mask_token": MASK, "eos_token": END, "unk_token": UNKNOWN}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=64, **special)


def build(folder: str, seed: int, *, width: int = 96, layers: int = 3) -> None:
    """Writes a BERT without dropout to a folder. Prompt and response may have 32 tokens together."""
    tokenizer = build_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = BertConfig(
            vocab_size=len(tokenizer),
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=width // 32,
            intermediate_size=2 * width,
            max_position_embeddings=32,
            type_vocab_size=1,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            initializer_range=0.08,  # about 1 / sqrt(width); a model as narrow as this learns far more slowly from 0.02
            pad_token_id=tokenizer.pad_token_id,
        )
        model = BertForMaskedLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)

"""A vision-language model of some 0.7M parameters that plays the card game: a card is one token of its image."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedTokenizerFast

from mmrl.policies.vlm.tiny_qwen import INITIALIZER_RANGE, Sizes, train_tokenizer, write
from mmrl.sims.turns.cards import COLORS, COUNTS, SIDE

VOCABULARY = 320  # maximum number of tokens


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Builds a byte-level BPE tokenizer, trained on the words of the card game."""
    corpus = [f"{word} 1" for word in (*COLORS, *COUNTS)] * 10
    corpus += ["Match the count.", "Match the colour.", *(f"{role}\n" for role in ("system", "user", "assistant"))] * 10
    return train_tokenizer(corpus, VOCABULARY)


def build(path: str | Path, seed: int = 0) -> None:
    """Writes model, processor and generation config to a folder that transformers' Auto classes load offline."""
    write(
        path,
        build_tokenizer(),
        Sizes("3", patch=SIDE, width=128, vision_width=64, rope=(2, 7, 7), vision_init_std=INITIALIZER_RANGE),
        seed,
    )

"""A vision-language model of some 0.2M parameters that plays the card game: a card is one token of its picture."""

from __future__ import annotations

from pathlib import Path

from mmrl.sims.turns.cards import SIDE
from transformers import PreTrainedTokenizerFast

from mmrl.policies.vlm.tiny_qwen import Sizes, byte_pairs, write

VOCABULARY = 320


def build_tokenizer() -> PreTrainedTokenizerFast:
    corpus = ["Match the count.", "Match the colour.", *(f"{role}\n" for role in ("system", "user", "assistant"))] * 10
    return byte_pairs(corpus, VOCABULARY)


def build(path: str | Path, seed: int = 0) -> None:
    """Writes model, processor and generation config to a folder that transformers' Auto classes load offline."""
    write(path, build_tokenizer(), Sizes("3", patch=SIDE, width=64, vision_width=32, rope=(2, 7, 7)), seed)

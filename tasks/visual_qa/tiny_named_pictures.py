"""A vision-language model small enough for a CPU that reads the rows of `NamedPicturesSource`."""

from __future__ import annotations

from pathlib import Path

from mmrl.tasks.named_pictures.pictures import names
from mmrl.tasks.visual_qa.named_pictures import NamedPicturesSource
from transformers import PreTrainedTokenizerFast

from mmrl.policies.vlm.tiny_qwen import INITIALIZER_RANGE, Sizes, byte_pairs, write

VOCABULARY = 1600  # enough that most names are one token


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE in which every digit is a token of its own, and most names are."""
    source = NamedPicturesSource("train", size=600, seed=0)
    corpus = [source[index].text for index in range(len(source))]
    corpus += [f"{name} {name}" for name in names()] * 4
    corpus += [f"{role}\n" for role in ("system", "user", "assistant")] * 10
    return byte_pairs(corpus, VOCABULARY)


def build(path: str | Path, seed: int = 0) -> None:
    """Writes model, processor and generation config to a folder that transformers' Auto classes load offline."""
    write(path, build_tokenizer(), Sizes("3", patch=16, merge=2, spread=INITIALIZER_RANGE), seed)

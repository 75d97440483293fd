"""A tiny language model of 0.6M parameters for prompts of digits; see `mmrl.policies.vlm.tiny_qwen`."""

from __future__ import annotations

from pathlib import Path

from mmrl.policies.vlm.tiny_qwen import Sizes, train_tokenizer, write
from mmrl.tasks.image_generation.data import digits

VOCABULARY = 384


def build(path: str | Path, seed: int = 0) -> None:
    """Writes model, processor and generation config to a folder that transformers' Auto classes load offline."""
    corpus = [text for split in digits.SPLITS for digit in range(10) for text in digits.texts(split, digit)]
    corpus += [f"{role}\n" for role in ("system", "user", "assistant")]
    write(path, train_tokenizer(corpus * 10, VOCABULARY), Sizes(), seed)

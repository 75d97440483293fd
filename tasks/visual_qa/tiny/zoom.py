"""A tiny vision-language model, small enough for a CPU, for the scenes of `ScenesSource` and the tool `zoom`."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedTokenizerFast

from mmrl.policies.vlm.tiny_qwen import Sizes, train_tokenizer, write
from mmrl.tasks.visual_qa.data.digits import CELL
from mmrl.tasks.visual_qa.data.scenes import COLORS

VOCABULARY = 384


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Builds a byte-level BPE tokenizer in which each decimal digit is a token."""
    corpus = [f"Which digit is on {color}?" for color in COLORS] * 10 + ["zoom(0,0,1,1)", "error: "] * 10
    corpus += [f"{role}\n" for role in ("system", "user", "assistant")] * 10
    return train_tokenizer(corpus, VOCABULARY)


def build(path: str | Path, seed: int = 0) -> None:
    """Writes model, processor and generation config to a folder that transformers' Auto classes load offline."""
    write(path, build_tokenizer(), Sizes("3", patch=CELL, width=64, vision_width=32, rope=(2, 7, 7)), seed)

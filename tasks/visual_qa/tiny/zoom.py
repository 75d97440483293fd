"""Tiny vision-language models, small enough for a CPU, for the tool `zoom`: one for the scenes of `ScenesSource`, one
for the still lifes of `StillLifesSource`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from mmrl.policies.vlm.tiny_qwen import INITIALIZER_RANGE, Sizes, train_tokenizer, write
from mmrl.tasks.visual_qa.data.digits import CELL
from mmrl.tasks.visual_qa.data.kinds import STILL_LIFE_COLOURS
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


def build_for_still_lifes(path: str | Path, seed: int = 0) -> None:
    """Writes a model for images of at most 32 x 32 pixels, in 16 patches, to a folder that transformers' Auto classes
    load offline."""
    corpus = [f"Which digit belongs to the {colour} object?" for colour in STILL_LIFE_COLOURS] * 10
    corpus += ["zoom(0,0,1,1)", "error: "] * 10 + [f"{role}\n" for role in ("system", "user", "assistant")] * 10
    shape = Sizes("3", patch=8, max_patches=16, width=64, vision_width=64, rope=(2, 7, 7))
    write(path, train_tokenizer(corpus, VOCABULARY), replace(shape, vision_init_std=INITIALIZER_RANGE), seed)

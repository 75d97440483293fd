"""A vision-language model of 0.6M parameters that reads the canvases of `DigitsSource`; see `policies.vlm.tiny_qwen`.

Its 8-pixel patches are the cells of a canvas, so a handwritten digit is one image token; its tokenizer is trained on
the questions and answers of `DigitsSource`.

    python -m mmrl.tasks.visual_qa.tiny.model PATH [--seed 0]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from mmrl.policies.vlm.tiny_qwen import Sizes, train_tokenizer, write
from mmrl.tasks.visual_qa.data.digits import CELL, DigitsSource

VOCABULARY = 512


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Builds a byte-level BPE tokenizer of at most 512 tokens. Each decimal digit is a token, so '14' is '1' and
    '4'."""
    source = DigitsSource("train", size=1000, seed=0)
    prompts = [source[index] for index in range(len(source))]
    corpus = [prompt.text for prompt in prompts] + [prompt.answer for prompt in prompts]
    # repeated, so that these texts become few tokens
    corpus += [f"{role}\n" for role in ("system", "user", "assistant")] * 10
    corpus += ["<think>", "</think>", "<answer>", "</answer>"] * 10
    return train_tokenizer(corpus, VOCABULARY)


def build(path: str | Path, seed: int = 0) -> None:
    """Writes model, processor and generation config to a folder that transformers' Auto classes load offline."""
    write(path, build_tokenizer(), Sizes(patch=CELL), seed)


def build_small(path: str | Path, seed: int = 0) -> None:
    """Writes a model of 0.1M parameters with the same processor, to be the student in distillation."""
    write(path, build_tokenizer(), Sizes(patch=CELL, width=64, layers=2, vision_width=32), seed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the tiny vision-language model of the digits task.")
    parser.add_argument("path", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    build(arguments.path, arguments.seed)

"""A vision-language model small enough for a CPU that watches the videos of `VideosSource`.

It is a Qwen3-VL, which puts the time of its frames into words: there transformers and vLLM agree on the positions of
tokens. Of Qwen2.5-VL's videos they do not (transformers 5.19 lets the text after a video begin where its sides end,
vLLM where its time does), which the probe of an engine notices.
"""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedTokenizerFast

from mmrl.policies.vlm.tiny_qwen import Sizes, byte_pairs, write
from mmrl.tasks.data.moving_shapes import DIRECTIONS, SHAPES, SPEEDS
from mmrl.tasks.visual_qa.data.videos import VideosSource

VOCABULARY = 400


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Builds a byte-level BPE in which every answer is a token."""
    source = VideosSource("train", size=120, seed=0)
    corpus = [source[index].text for index in range(len(source))]
    corpus += [word for words in (SHAPES, DIRECTIONS, SPEEDS) for word in words] * 20
    corpus += [f"<{second}.{tenth} seconds>" for second in range(3) for tenth in range(10)] * 20
    corpus += [f"{role}\n" for role in ("system", "user", "assistant")] * 10
    return byte_pairs(corpus, VOCABULARY, digits_apart=False)


def build(path: str | Path, seed: int = 0) -> None:
    """Writes model, processor and generation config to a folder that transformers' Auto classes load offline."""
    write(path, build_tokenizer(), Sizes("3", patch=4, width=96, vision_width=64, rope=(4, 6, 6)), seed)

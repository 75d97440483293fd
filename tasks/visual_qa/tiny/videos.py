"""A tiny Qwen3-VL, small enough for a CPU, for the videos of `VideosSource`.

Qwen3-VL writes the time of frames as text, and transformers and vLLM compute the same position ids for it. For videos
of Qwen2.5-VL they differ: after a video, transformers 5.19 continues from the largest spatial position, vLLM from the
largest temporal one. Then the check of vLLM's log-probabilities before training fails.
"""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedTokenizerFast

from mmrl.policies.vlm.tiny_qwen import Sizes, train_tokenizer, write
from mmrl.tasks.data.moving_shapes import DIRECTIONS, SHAPES, SPEEDS
from mmrl.tasks.visual_qa.data.videos import VideosSource

VOCABULARY = 400


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Builds a byte-level BPE tokenizer in which each answer is one token."""
    source = VideosSource("train", size=120, seed=0)
    corpus = [source[index].text for index in range(len(source))]
    # repeated, so that these texts become few tokens
    corpus += [word for words in (SHAPES, DIRECTIONS, SPEEDS) for word in words] * 20
    corpus += [f"<{second}.{tenth} seconds>" for second in range(3) for tenth in range(10)] * 20
    corpus += [f"{role}\n" for role in ("system", "user", "assistant")] * 10
    return train_tokenizer(corpus, VOCABULARY, digits_apart=False)


def build(path: str | Path, seed: int = 0) -> None:
    """Writes model, processor and generation config to a folder that transformers' Auto classes load offline."""
    write(path, build_tokenizer(), Sizes("3", patch=4, width=96, vision_width=64, rope=(4, 6, 6)), seed)

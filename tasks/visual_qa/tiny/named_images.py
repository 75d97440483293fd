"""A tiny Qwen2.5-VL, small enough for a CPU, for the rows of `NamedImagesSource`.

Each image of a row is one image token that depends on that image only: the vision encoder attends within windows of the
size of an image, with relative positions. So the model recognises an image at any position of the row.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mmrl.policies.vlm.tiny_qwen import END, PAD, START, VISION, Sizes, fast_tokenizer, write
from mmrl.tasks.data.named_images.images import SIDE, names

UNKNOWN = "<|unknown|>"
WORDS = (  # words of roles, questions and answers, besides the names
    *("system", "user", "assistant", "What", "Where", "How", "many", "show", "a", "is", "are", "it", "they", "the"),
    *("in", "on", "of", "left", "middle", "right", "?", "1", "2", "3", "4"),
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Builds a tokenizer with one token for each word, so that a name is the same token in questions and answers."""
    entries = [PAD, START, END, *VISION, UNKNOWN, *WORDS, *names()]
    tokenizer = Tokenizer(models.WordLevel({entry: i for i, entry in enumerate(entries)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return fast_tokenizer(tokenizer, 512, unk_token=UNKNOWN)


def build(path: str | Path, seed: int = 0) -> None:
    """Writes model, processor and generation config to a folder that transformers' Auto classes load offline."""
    write(path, build_tokenizer(), Sizes(patch=SIDE // 2, merge=2, window=SIDE), seed)

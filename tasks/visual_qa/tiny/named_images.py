"""A vision-language model small enough for a CPU that reads the rows of `NamedImagesSource`.

An image of a row is one image token, which depends on that image alone: the vision half of a Qwen2.5-VL attends
within windows of an image's size, and knows relative positions only. So a name is known wherever its image stands.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mmrl.policies.vlm.tiny_qwen import END, PAD, START, VISION, Sizes, fast_tokenizer, write
from mmrl.tasks.data.named_images.images import SIDE, names

UNKNOWN = "<|unknown|>"
WORDS = (  # of roles, questions and answers, beside the names
    *("system", "user", "assistant", "What", "Where", "How", "many", "show", "a", "is", "are", "it", "they", "the"),
    *("in", "on", "of", "left", "middle", "right", "?", "1", "2", "3", "4"),
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Builds a tokenizer with one token a word: a name is the same token in a question and as an answer."""
    entries = [PAD, START, END, *VISION, UNKNOWN, *WORDS, *names()]
    tokenizer = Tokenizer(models.WordLevel({entry: i for i, entry in enumerate(entries)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return fast_tokenizer(tokenizer, 512, unk_token=UNKNOWN)


def build(path: str | Path, seed: int = 0) -> None:
    """Writes model, processor and generation config to a folder that transformers' Auto classes load offline."""
    write(path, build_tokenizer(), Sizes(patch=SIDE // 2, merge=2, window=SIDE), seed)

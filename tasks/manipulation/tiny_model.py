"""Tiny models that act in the tabletop simulator on a CPU: `SmallBackbone`s, and a Qwen3-VL of transformers (`build`).

The vocabulary is the words of the instructions and 256 action tokens. Only `build` imports transformers, which takes
seconds.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mmrl.policies.vla.backbones import small, states_only

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

UNKNOWN = "<|unknown|>"
WORDS = (  # of roles, the prompt and the tabletop's instructions
    *("system", "user", "assistant", "What", "what", "action", "should", "the", "robot", "take", "to", "?", "."),
    *("reach", "for", "push", "lift", "put", "stack", "cube", "on", "left", "right", "pad"),
    *("red", "green", "blue", "yellow"),
)
BINS = 256


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Builds a tokenizer with one token for each word, and 256 action tokens at the end."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    from mmrl.policies.vlm.tiny_qwen import END, PAD, START, VISION, fast_tokenizer

    names = [PAD, START, END, *VISION, UNKNOWN, *WORDS, *(f"<action_{i}>" for i in range(BINS))]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return fast_tokenizer(tokenizer, 256, unk_token=UNKNOWN)


def build_small(path: str | Path, seed: int = 0) -> None:
    """Writes a `SmallBackbone` with the vocabulary of the tabletop simulator."""
    small.create(path, small.SmallActionConfig(WORDS, bins=BINS), seed)


def build_labelled(path: str | Path, seed: int = 0) -> None:
    """Writes the model of `build_small` with the words of `action.labels` in its vocabulary."""
    small.create(path, small.SmallActionConfig((*WORDS, "Advantage:", "positive", "negative"), bins=BINS), seed)


def build_normalised(path: str | Path, seed: int = 0) -> None:
    """Writes the model of `build_small` with normalised channels, for tasks with several objects."""
    small.create(path, small.SmallActionConfig(WORDS, bins=BINS, normalise=True), seed)


def build_blind(path: str | Path, seed: int = 0) -> None:
    """Writes the model of `build_small` without a vision encoder, for simulators that observe states only."""
    small.create(path, small.SmallActionConfig(WORDS, bins=BINS, channels=()), seed)


def build_states(path: str | Path, seed: int = 0) -> None:
    """Writes a folder without a backbone, for an action head that reads the robot's state. The head's weights are
    initialised when it is built."""
    states_only.create(path)


def build(path: str | Path, seed: int = 0) -> None:
    """Writes model, processor and generation config to a folder that transformers' Auto classes load offline."""
    from mmrl.policies.vlm.tiny_qwen import Sizes, write

    write(path, build_tokenizer(), Sizes(generation="3", merge=2, rope=(2, 7, 7)), seed)

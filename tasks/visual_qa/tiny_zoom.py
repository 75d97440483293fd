"""A vision-language model small enough for a CPU that looks at the scenes of `ScenesSource` and calls `zoom`."""

from __future__ import annotations

from pathlib import Path

from mmrl.tasks.visual_qa.digits import CELL
from mmrl.tasks.visual_qa.scenes import COLOURS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from mmrl.policies.vlm.tiny_qwen import END, PAD, START, VISION, Sizes, fast_tokenizer, write

VOCABULARY = 384


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE in which every digit is a token of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    corpus = [f"Which digit is on {colour}?" for colour in COLOURS] * 10 + ["zoom(0,0,1,1)", "error: "] * 10
    corpus += [f"{role}\n" for role in ("system", "user", "assistant")] * 10
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        min_frequency=2,
        special_tokens=[PAD, START, END, *VISION],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return fast_tokenizer(tokenizer, 512)


def build(path: str | Path, seed: int = 0) -> None:
    """Writes model, processor and generation config to a folder that transformers' Auto classes load offline."""
    write(path, build_tokenizer(), Sizes("3", patch=CELL, width=64, vision_width=32, rope=(2, 7, 7)), seed)

"""A vision-language model small enough for a CPU that reads the rows of `NamedPicturesSource`."""

from __future__ import annotations

from pathlib import Path

from mmrl.tasks.named_pictures.pictures import names
from mmrl.tasks.visual_qa.named_pictures import NamedPicturesSource
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from mmrl.policies.vlm.tiny_qwen import END, INITIALIZER_RANGE, PAD, START, VISION, Sizes, fast_tokenizer, write

VOCABULARY = 1600  # enough that most names are one token


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE in which every digit is a token of its own, and most names are."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    source = NamedPicturesSource("train", size=600, seed=0)
    corpus = [source[index].text for index in range(len(source))]
    corpus += [f"{name} {name}" for name in names()] * 4
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
    write(path, build_tokenizer(), Sizes("3", patch=16, merge=2, spread=INITIALIZER_RANGE), seed)

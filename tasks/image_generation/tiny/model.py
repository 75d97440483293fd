"""Tiny diffusion models for digits and shapes, randomly initialised, whose vocabulary is the words of the prompts."""

from __future__ import annotations

from pathlib import Path

from mmrl.policies.diffusion.small import SmallDiffusionConfig, create
from mmrl.tasks.image_generation.data import digits, shapes


def build_digits(folder: str, seed: int) -> None:
    """Writes a perceptron of 0.2M parameters for images of 1 x 8 x 8. seed: the random seed of its weights."""
    create(Path(folder), SmallDiffusionConfig(words=tuple(digits.words()), channels=1, size=digits.SIZE), seed)


def build_shapes(folder: str, seed: int) -> None:
    """Writes a modulated perceptron of 1.8M parameters for images of 3 x 16 x 16. It embeds a prompt as the sum of its
    words' embeddings."""
    config = SmallDiffusionConfig(
        words=tuple(shapes.words()),
        channels=3,
        size=shapes.SIZE,
        network="modulated_mlp",
        width=256,
        depth=4,
        max_words=12,
        predicts="data",
    )
    create(Path(folder), config, seed)

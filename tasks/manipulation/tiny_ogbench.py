"""A tiny vision-language-action model for OGBench, which observes states and the words of the instructions."""

from __future__ import annotations

from pathlib import Path

from mmrl.policies.vla.backbones import small

WORDS = (  # of the instructions of `mmrl.sims.ogbench`
    *("press", "open", "close", "move", "the", "left", "right"),
    *("button", "drawer", "window", "cube", "to", "mark"),
)


def build(path: str | Path, seed: int = 0) -> None:
    """Writes a `SmallBackbone` with the vocabulary WORDS and without a vision encoder."""
    small.create(path, small.SmallActionConfig(WORDS, bins=32, channels=()), seed)

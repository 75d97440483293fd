"""A small vision-language-action model that reads OGBench's states and the words of its tasks."""

from __future__ import annotations

from pathlib import Path

from mmrl.policies.vla.backbones import small

WORDS = (  # of the instructions of `mmrl.sims.ogbench`
    *("press", "open", "close", "move", "the", "left", "right"),
    *("button", "drawer", "window", "cube", "to", "mark"),
)


def build(path: str | Path, seed: int = 0) -> None:
    """Writes a `SmallBackbone` that knows WORDS and sees no images."""
    small.create(path, small.SmallActionConfig(WORDS, bins=32, channels=()), seed)

"""A tiny vision-language-action model for BabyAI: its vocabulary, and an action token for each of its seven actions."""

from __future__ import annotations

from pathlib import Path

from mmrl.policies.vla.backbones import small

WORDS = (  # of the grammar of instructions, and the end of a prompt
    *("?", "the", "a", "to", "and", "then", "after", "you"),
    *("go", "pick", "up", "open", "put", "next", "object", "ball", "box", "key", "door"),
    *("in", "front", "of", "on", "your", "left", "right", "behind"),
    *("red", "green", "blue", "purple", "yellow", "grey"),
)
BINS = 8  # edges of seven intervals, one for each action
SQUARES = 11  # along each side of the agent's view: the simulator's option `around`, with `tile` 0
CODES = (11, 6, 3)  # numbers of objects, colors and states of minigrid


def build(path: str | Path, seed: int = 0) -> None:
    """Writes a `SmallBackbone` with the vocabulary WORDS that reads minigrid's codes in place of images."""
    small.create(
        path, small.SmallActionConfig(WORDS, bins=BINS, width=128, layers=1, squares=SQUARES, codes=CODES), seed
    )

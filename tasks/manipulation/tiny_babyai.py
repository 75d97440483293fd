"""A small vision-language-action model that knows BabyAI's words and has a token for each of its seven actions."""

from __future__ import annotations

from pathlib import Path

from mmrl.policies.vla.backbones import small

WORDS = (  # of the grammar of instructions, and the end of a prompt
    *("?", "the", "a", "to", "and", "then", "after", "you"),
    *("go", "pick", "up", "open", "put", "next", "object", "ball", "box", "key", "door"),
    *("in", "front", "of", "on", "your", "left", "right", "behind"),
    *("red", "green", "blue", "purple", "yellow", "grey"),
)
BINS = 8  # seven intervals between them
SQUARES = 11  # along each side of the agent's view: the recipe's option `around`; its `tile` is 0
CODES = (11, 6, 3)  # objects, colours and states of minigrid


def build(path: str | Path, seed: int = 0) -> None:
    """Writes a `SmallBackbone` that knows WORDS and reads minigrid's codes."""
    small.create(
        path, small.SmallActionConfig(WORDS, bins=BINS, width=128, layers=1, squares=SQUARES, codes=CODES), seed
    )

"""Questions about words, without an image: for a language half that knew their meaning before it was trained."""

from __future__ import annotations

from typing import Literal

from mmrl.rollouts import Prompt
from mmrl.tasks.data.named_images.images import groups, names

SPLITS = ("train", "heldout")
NO_FOOD = ("teapot",)  # of the group food
NO_ANIMALS = ("cactus", "mushroom", "rose", "shamrock", "sunflower", "tulip")  # of the group nature
TEXTS = {"food": "Can you eat {}? Answer yes or no.", "animal": "Is {} an animal? Answer yes or no."}


class WordsSource:
    """Questions whether one can eat a thing, and whether something is an animal: the same whatever the seed.

    Answers yes and no come in turns, so that one answer to all is right for half of them. Every word is asked about
    once, and no word of a split is one of the other. Metadata: `kind`, food or animal, and `name`.

    Raises ValueError for an unknown split.
    """

    def __init__(self, split: Literal["train", "heldout"]) -> None:
        if split not in SPLITS:
            raise ValueError(f"split must be one of {', '.join(SPLITS)}, not {split!r}")
        self.split = split
        self._questions = [row for i, row in enumerate(_questions()) if i // 2 % 2 == SPLITS.index(split)]

    def __len__(self) -> int:
        return len(self._questions)

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < len(self):
            raise IndexError(index)
        kind, name, answer = self._questions[index]
        named = f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
        shown = {"kind": kind, "name": name, "demonstration": answer}
        return Prompt(f"words-{kind}-{name}", TEXTS[kind].format(named), answer=answer, metadata=shown)


def _questions() -> list[tuple[str, str, str]]:
    """Returns kind, word and answer of all questions."""
    of = list(zip(names(), groups(), strict=True))
    food = [name for name, group in of if group == "food" and name not in NO_FOOD]
    animals = [name for name, group in of if group == "nature" and name not in NO_ANIMALS]
    things = [name for name, group in of if group in ("objects", "travel", "activities")]
    few = min(len(food), len(animals), len(things) // 2)
    pairs = [("food", food[:few], things[::2][:few]), ("animal", animals[:few], things[1::2][:few])]
    return [
        (kind, name, answer)
        for kind, right, wrong in pairs
        for pair in zip(right, wrong, strict=True)
        for name, answer in zip(pair, ("yes", "no"), strict=True)
    ]

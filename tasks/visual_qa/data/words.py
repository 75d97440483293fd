"""Questions about words, without an image: they test whether a pretrained language model still knows their meaning."""

from __future__ import annotations

from typing import Literal

from mmrl.rollouts import Prompt
from mmrl.tasks.data.named_images.images import groups, names

SPLITS = ("train", "heldout")
NOT_FOOD = ("teapot",)  # names in the group food that cannot be eaten
# Names in the group nature that are not animals.
NOT_ANIMALS = ("cactus", "mushroom", "rose", "shamrock", "sunflower", "tulip")
TEXTS = {"food": "Can you eat {}? Answer yes or no.", "animal": "Is {} an animal? Answer yes or no."}


class WordsSource:
    """Questions whether a thing can be eaten, and whether it is an animal. They depend on no seed.

    Half of the answers are yes, half no. There is one question about each word, and the splits have no word in common.
    Metadata: `kind` (food or animal), `name` and `demonstration` (the answer).

    Raises ValueError for an unknown split.
    """

    def __init__(self, split: Literal["train", "heldout"]) -> None:
        if split not in SPLITS:
            raise ValueError(f"split must be one of {', '.join(SPLITS)}, not {split!r}")
        self.split = split
        # a question with the answer yes and one with no follow one another; every other such pair is held out
        self._questions = [row for i, row in enumerate(_questions()) if i // 2 % 2 == SPLITS.index(split)]

    def __len__(self) -> int:
        return len(self._questions)

    def __getitem__(self, index: int) -> Prompt:
        """Returns question `index`, such as "Is a fox an animal?", with the answer yes or no."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        kind, name, answer = self._questions[index]
        with_article = f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
        metadata = {"kind": kind, "name": name, "demonstration": answer}
        return Prompt(f"words-{kind}-{name}", TEXTS[kind].format(with_article), answer=answer, metadata=metadata)


def _questions() -> list[tuple[str, str, str]]:
    """Returns kind, word and answer of all questions, where yes and no alternate."""
    groups_of_names = list(zip(names(), groups(), strict=True))
    food = [name for name, group in groups_of_names if group == "food" and name not in NOT_FOOD]
    animals = [name for name, group in groups_of_names if group == "nature" and name not in NOT_ANIMALS]
    things = [name for name, group in groups_of_names if group in ("objects", "travel", "activities")]
    size = min(len(food), len(animals), len(things) // 2)
    words_by_kind = [("food", food[:size], things[::2][:size]), ("animal", animals[:size], things[1::2][:size])]
    questions = []
    for kind, yes_words, no_words in words_by_kind:
        for pair in zip(yes_words, no_words, strict=True):
            questions += [(kind, name, answer) for name, answer in zip(pair, ("yes", "no"), strict=True)]
    return questions

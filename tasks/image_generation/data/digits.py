"""Sentences that ask for a handwritten digit: real images to learn from, and two classifiers to judge what is drawn.

The images are the 1797 8x8 images of `mmrl.tasks.data.handwritten_digits` (the test part of the UCI set "Optical
Recognition of Handwritten Digits", Alpaydin and Kaynak, 1998). Each class's every fourth image is held out, as in the
visual QA task; the others are dealt to the two classifiers, so that the one that rewards and the one that measures
share neither architecture nor images.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from mmrl.rewards.types import score_finite
from mmrl.rollouts import Prompt, Sample
from mmrl.tasks.data.handwritten_digits import load_digits
from mmrl.tasks.image_generation.data.images import stack_images
from mmrl.tasks.image_generation.rewards.classifiers import SIZE, trained

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
PHRASINGS = (
    "a handwritten {}",
    "the digit {}",
    "the number {} in pencil",
    "draw a {}",
    "someone wrote {}",
    "a drawn {}",
)
SPLITS = ("train", "heldout")
Split = Literal["train", "heldout"]
Judge = Literal["reward", "second"]
JUDGES = ("reward", "second")


def words() -> list[str]:
    """Returns every word of every sentence, sorted."""
    return sorted(
        {word for split in SPLITS for digit in range(10) for text in texts(split, digit) for word in text.split()}
    )


def texts(split: str, digit: int) -> list[str]:
    """Returns the texts by which a split asks for a digit. A phrasing that training joins to the word ('a handwritten
    seven') is held out with the numeral ('a handwritten 7') and the other way round: no held-out text is trained on,
    every word of it is.
    """
    spelled = split == "train"
    return [
        phrasing.format(NAMES[digit] if (index % 2 == 0) == spelled else digit)
        for index, phrasing in enumerate(PHRASINGS)
    ]


@lru_cache(maxsize=1)
def _digits() -> tuple[Tensor, np.ndarray]:
    """Returns all images [image, 1, 8, 8] float32, 0 to 1, and their labels [image]."""
    images, labels = load_digits()
    return torch.from_numpy(images / 16).float().unsqueeze(1), labels


@lru_cache(maxsize=2)
def split_indices(split: Split) -> np.ndarray:
    """Returns the indices of the images of a split: of each digit every fourth is held out, whatever the seed."""
    _, labels = _digits()
    rank = np.array([np.count_nonzero(labels[:image] == label) for image, label in enumerate(labels)])
    return np.flatnonzero((rank % 4 == 3) == (split == "heldout"))


class DigitPromptSource:
    """`size` prompts for digits; item i asks for digit i % 10 and depends on (split, seed, i) and `careless` only.

    The answer is the digit. Metadata: `image` (an index into `load_digits`) and `target`, that image for supervised
    training, [1, 8, 8] float32, 0 to 1. For the share `careless` it shows another digit, so that a supervised run ends
    with a base that often draws the wrong one. Training and held-out prompts share neither texts nor
    images nor random streams. With `rejected` the metadata also has such an image of another digit than the
    requested one; with `reasoning` a text that names what is shown ("the digit seven"); with `twins` the prompt
    that asks for another digit in the same words.
    """

    def __init__(
        self,
        split: Split = "train",
        *,
        size: int,
        seed: int,
        careless: float = 0.0,
        rejected: bool = False,
        reasoning: bool = False,
        twins: bool = False,
    ):
        self.split, self.size, self.seed, self.careless, self.rejected = split, size, seed, careless, rejected
        self.reasoning, self.twins = reasoning, twins
        _, labels = _digits()
        self._pools = [np.array([i for i in split_indices(split) if labels[i] == digit]) for digit in range(10)]

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < self.size:
            raise IndexError(f"item {index} of {self.size}")
        rng = np.random.default_rng([SPLITS.index(self.split), self.seed, index])
        digit = index % 10
        text = str(rng.choice(texts(self.split, digit)))
        wrong = int(rng.integers(1, 10))
        shown = (digit + wrong) % 10 if rng.random() < self.careless else digit
        image = int(rng.choice(self._pools[shown]))
        metadata: dict[str, Any] = {"image": image, "target": _digits()[0][image]}
        if self.rejected:
            other = int(rng.choice(self._pools[(digit + int(rng.integers(1, 10))) % 10]))
            metadata["rejected"] = _digits()[0][other]
        if self.reasoning:
            metadata["reasoning"] = f"the digit {NAMES[shown]}"
        if self.twins:
            other = (digit + int(rng.integers(1, 10))) % 10
            twin_text = texts(self.split, other)[texts(self.split, digit).index(text)]
            metadata["twin"] = Prompt(id=f"digits-{self.split}-{self.seed}-{index}-twin", text=twin_text, answer=other)
        return Prompt(id=f"digits-{self.split}-{self.seed}-{index}", text=text, answer=digit, metadata=metadata)


def half(judge: Judge) -> np.ndarray:
    """Returns the indices of the images that a classifier learns from: every second one to train on."""
    return split_indices("train")[JUDGES.index(judge) :: 2]


@lru_cache(maxsize=2)
def classifier(judge: Judge) -> nn.Module:
    """Returns one of two classifiers of [image, 1, 8, 8] of 0 to 1, logits [image, 10], trained once on a machine.

    `reward` is a perceptron and saw one half of the training images, `second` a convolutional network that saw the
    other.
    """
    images, labels = _digits()
    indices = torch.from_numpy(half(judge))
    return trained(images[indices], torch.from_numpy(labels)[indices], convolutions=judge == "second")


def reward_classifier() -> nn.Module:
    """Returns the classifier of the default reward, for `classifier_logp`."""
    return copy.deepcopy(classifier("reward"))


def second_classifier() -> nn.Module:
    """Returns the classifier that measures and never rewards, for `classifier_logp`."""
    return copy.deepcopy(classifier("second"))


def digit_features() -> nn.Module:
    """Returns the classifier that rewards, whose logits are the features, for `set_distance`."""
    return reward_classifier()


def real_digits() -> Tensor:
    """Returns all images to train on, [image, 1, 8, 8], for `set_distance`."""
    return _digits()[0][torch.from_numpy(split_indices("train"))]


def heldout_accuracy(judge: Judge) -> float:
    """Returns the share of the held-out real images that a classifier names rightly."""
    images, labels = _digits()
    rows = torch.from_numpy(split_indices("heldout"))
    named = classifier(judge)(images[rows]).argmax(-1)
    return (named == torch.from_numpy(labels)[rows]).float().mean().item()


class DigitCorrect:
    """Reward: 1 where a classifier takes the image, clamped to 0..1, for the requested digit (prompt.answer), else 0.

    None for an image that holds NaN or inf. Scoring raises UserError for images that are not [1, 8, 8].
    """

    scope: Literal["sample"] = "sample"

    def __init__(self, *, judge: Judge = "second"):
        if judge not in JUDGES:
            raise ValueError(f"judge must be one of {', '.join(JUDGES)}, not {judge!r}")
        self._classifier = classifier(judge)

    def score(self, samples: Sequence[Sample]) -> list[float | None]:
        return score_finite(samples, self._score)

    def _score(self, samples: list[Sample]) -> list[float]:
        images = stack_images(samples, (1, SIZE, SIZE))
        named = self._classifier(images.clamp(0, 1)).argmax(-1)
        return (named == torch.tensor([sample.prompt.answer for sample in samples])).float().tolist()

"""Prompts that ask for a handwritten digit, real images for supervised training, and two classifiers of images.

The images are the 1797 8x8 images of `mmrl.tasks.data.handwritten_digits` (the test part of the UCI set "Optical
Recognition of Handwritten Digits", Alpaydin and Kaynak, 1998). Every fourth image of each digit is held out. The others
are divided among two classifiers: one for the reward, and one for accuracy, which has another architecture and was
trained on other images.
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
from mmrl.tasks.image_generation.rewards.classifiers import SIZE, trained_classifier

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
    """Returns all words of the prompts, sorted."""
    all_texts = [text for split in SPLITS for digit in range(10) for text in texts(split, digit)]
    return sorted({word for text in all_texts for word in text.split()})


def texts(split: str, digit: int) -> list[str]:
    """Returns the prompts of a split for a digit, one for each of PHRASINGS.

    If the training split has a phrasing with the word ('a handwritten seven'), the held-out split has it with the
    numeral ('a handwritten 7'), and vice versa. So held-out prompts are new, but all of their words are trained on.
    """
    words_at_even = split == "train"
    return [
        phrasing.format(NAMES[digit] if (index % 2 == 0) == words_at_even else digit)
        for index, phrasing in enumerate(PHRASINGS)
    ]


@lru_cache(maxsize=1)
def _digits() -> tuple[Tensor, np.ndarray]:
    """Returns all images [image, 1, 8, 8] float32, 0 to 1, and their labels [image]."""
    images, labels = load_digits()
    return torch.from_numpy(images / 16).float().unsqueeze(1), labels


@lru_cache(maxsize=2)
def split_indices(split: Split) -> np.ndarray:
    """Returns the indices of the images of a split. Every fourth image of each digit is held out; the split depends on
    no seed."""
    _, labels = _digits()
    # for each image, how many images of the same digit come before it
    rank = np.array([np.count_nonzero(labels[:image] == label) for image, label in enumerate(labels)])
    return np.flatnonzero((rank % 4 == 3) == (split == "heldout"))


class DigitPromptSource:
    """`size` prompts for digits; item i asks for digit i % 10 and depends on (split, seed, i) and the options only.

    The answer is the digit. Training and held-out prompts share no text, image or random numbers. Metadata:

    image, target     an index into `load_digits`, and that image [1, 8, 8] float32, 0 to 1, for supervised training. In
                      the share `wrong_share` it shows another digit, so that the trained model often draws wrong digits
    rejected          if `rejected`: an image of another digit
    reasoning         if `reasoning`: a text that names the digit of the target, such as "the digit seven"
    twin              if `twins`: a prompt that asks for another digit in the same words
    """

    def __init__(
        self,
        split: Split = "train",
        *,
        size: int,
        seed: int,
        wrong_share: float = 0.0,
        rejected: bool = False,
        reasoning: bool = False,
        twins: bool = False,
    ):
        self.split, self.size, self.seed, self.wrong_share = split, size, seed, wrong_share
        self.rejected, self.reasoning, self.twins = rejected, reasoning, twins
        _, labels = _digits()
        # for each digit, the indices of its images
        self._pools = [np.array([i for i in split_indices(split) if labels[i] == digit]) for digit in range(10)]

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Prompt:
        """Returns prompt `index`, which asks for digit `index` % 10. Its text and images are random, but determined by
        the split, the seed and `index`.

        Its metadata has a target image, which shows a wrong digit with the probability `wrong_share`; and if these
        options are set, an image of a wrong digit (`rejected`), the target's digit in words (`reasoning`), and a prompt
        with the same sentence about another digit (`twins`).
        """
        if not 0 <= index < self.size:
            raise IndexError(f"index {index} is out of range: there are {self.size} prompts")
        rng = np.random.default_rng([SPLITS.index(self.split), self.seed, index])
        digit = index % 10
        text = str(rng.choice(texts(self.split, digit)))
        wrong_digit = (digit + int(rng.integers(1, 10))) % 10
        target_digit = wrong_digit if rng.random() < self.wrong_share else digit
        image = int(rng.choice(self._pools[target_digit]))
        metadata: dict[str, Any] = {"image": image, "target": _digits()[0][image]}
        if self.rejected:
            rejected_image = int(rng.choice(self._pools[(digit + int(rng.integers(1, 10))) % 10]))
            metadata["rejected"] = _digits()[0][rejected_image]
        if self.reasoning:
            metadata["reasoning"] = f"the digit {NAMES[target_digit]}"
        if self.twins:
            twin = (digit + int(rng.integers(1, 10))) % 10
            twin_text = texts(self.split, twin)[texts(self.split, digit).index(text)]
            metadata["twin"] = Prompt(id=f"digits-{self.split}-{self.seed}-{index}-twin", text=twin_text, answer=twin)
        return Prompt(id=f"digits-{self.split}-{self.seed}-{index}", text=text, answer=digit, metadata=metadata)


def training_indices(judge: Judge) -> np.ndarray:
    """Returns the indices of the images that a classifier is trained on: one half of the training split."""
    return split_indices("train")[JUDGES.index(judge) :: 2]


@lru_cache(maxsize=2)
def classifier(judge: Judge) -> nn.Module:
    """Returns a classifier that maps images [image, 1, 8, 8], 0 to 1, to logits [image, 10].

    "reward" is a perceptron, "second" a convolutional network; each is trained on one half of the training images. The
    first call on a machine trains it, later ones read it from a cache.
    """
    images, labels = _digits()
    indices = torch.from_numpy(training_indices(judge))
    return trained_classifier(images[indices], torch.from_numpy(labels)[indices], convolutions=judge == "second")


def reward_classifier() -> nn.Module:
    """Returns the classifier of the default reward, for the reward `classifier_logp`."""
    return copy.deepcopy(classifier("reward"))


def second_classifier() -> nn.Module:
    """Returns the classifier that is no part of the default reward, for `classifier_logp` as a second scorer."""
    return copy.deepcopy(classifier("second"))


def digit_features() -> nn.Module:
    """Returns the reward's classifier, whose logits are the features of the reward `set_distance`."""
    return reward_classifier()


def real_digits() -> Tensor:
    """Returns all training images [image, 1, 8, 8], 0 to 1, for the reward `set_distance`."""
    return _digits()[0][torch.from_numpy(split_indices("train"))]


def heldout_accuracy(judge: Judge) -> float:
    """Returns the accuracy of a classifier on the held-out real images."""
    images, labels = _digits()
    rows = torch.from_numpy(split_indices("heldout"))
    predicted = classifier(judge)(images[rows]).argmax(-1)
    return (predicted == torch.from_numpy(labels)[rows]).float().mean().item()


class DigitCorrect:
    """Reward: 1 if a classifier recognises the requested digit (prompt.answer) in the image, clamped to 0..1, else 0.

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
        predicted = self._classifier(images.clamp(0, 1)).argmax(-1)
        return (predicted == torch.tensor([sample.prompt.answer for sample in samples])).float().tolist()

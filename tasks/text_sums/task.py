"""Sums to train on, held-out sums, and the rewards of an answer."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import torch

from mmrl.rewards import RewardSet
from mmrl.rewards.settings import RewardSpec
from mmrl.rollouts import Prompt, Sample
from mmrl.tasks.text_sums.settings import TextSumsSettings

CHARACTERS = "0123456789+="
SPLITS = ("train", "heldout")
Split = Literal["train", "heldout"]


class TextSums:
    """A task: sums to train on, sums held out, rewards, and whether an answer is right."""

    def __init__(self, settings: TextSumsSettings, seed: int) -> None:
        largest = settings.largest
        self.train = Sums("train", settings.train_size, seed, largest, settings.careless)
        self.evaluation = Sums("heldout", settings.eval_size, settings.eval_seed, largest)
        self.rewards, self._accuracy = RewardSet(settings.rewards), RewardSet([RewardSpec(name="exact_match")])
        self.reward_names, self.reward_weights = self.rewards.names, self.rewards.weights

    def score(self, samples: Sequence[Sample], group: torch.Tensor | None = None) -> torch.Tensor:
        """Returns unweighted reward components [rollout, component], float32, NaN where one could not be scored."""
        return self.rewards.score(samples, group)

    def unscored_reasons(self) -> Mapping[str, str]:
        """Why a rollout was not scored, by reward."""
        return self.rewards.reasons

    def accuracy(self, samples: Sequence[Sample]) -> torch.Tensor:
        """Returns 1 for the right number, else 0, [rollout]."""
        return self._accuracy.score(samples)[:, 0]

    def measures(self, samples: Sequence[Sample], group: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the length of the response in tokens, [rollout]."""
        return {"response/length": torch.tensor([float(s.response_length) for s in samples])}


class Sums:
    """`size` prompts `a+b=`, whose answer is the sum; item i depends on (split, seed, i), and what it shows in
    metadata["demonstration"] on `careless` too."""

    def __init__(self, split: Split, size: int, seed: int, largest: int, careless: float = 0.0) -> None:
        self.split, self.size, self.seed, self.largest, self.careless = split, size, seed, largest, careless

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < self.size:
            raise IndexError(f"item {index} of {self.size}")
        rng = np.random.default_rng([SPLITS.index(self.split), self.seed, index])
        while True:
            a, b = (int(n) for n in rng.integers(0, self.largest + 1, 2))
            if held_out(a, b) == (self.split == "heldout"):
                break
        shown = without_carry(a, b) if rng.random() < self.careless else a + b
        metadata = {"demonstration": str(shown), "kind": "carry" if without_carry(a, b) != a + b else "plain"}
        return Prompt(f"sums-{self.split}-{self.seed}-{index}", f"{a}+{b}=", answer=str(a + b), metadata=metadata)


def held_out(a: int, b: int) -> bool:
    """Returns whether a pair is held out: about every fourth, and its mirror image with it."""
    low, high = sorted((a, b))
    return zlib.crc32(f"{low}+{high}".encode()) % 4 == 3


def without_carry(a: int, b: int) -> int:
    """Returns the sum without the carry from the ones: 27 and 45 give 62."""
    return a // 10 * 10 + b // 10 * 10 + (a + b) % 10 if a % 10 + b % 10 > 9 else a + b

"""The task of sums: training prompts, held-out prompts, rewards and accuracy."""

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
    """The task: training sums, held-out sums, and rewards. seed: the random seed of the training sums."""

    def __init__(self, settings: TextSumsSettings, seed: int) -> None:
        largest = settings.largest
        self.train = Sums("train", settings.train_size, seed, largest, settings.careless)
        self.evaluation = Sums("heldout", settings.eval_size, settings.eval_seed, largest)
        self.rewards, self._accuracy = RewardSet(settings.rewards), RewardSet([RewardSpec(name="exact_match")])
        self.reward_names, self.reward_weights = self.rewards.names, self.rewards.weights

    def score(self, samples: Sequence[Sample], group: torch.Tensor | None = None) -> torch.Tensor:
        """Returns unweighted rewards [rollout, component], float32; NaN: it could not be computed. group:
        [rollout], the index of each rollout's prompt."""
        return self.rewards.score(samples, group)

    def unscored_reasons(self) -> Mapping[str, str]:
        """Returns for each reward with a NaN in the last `score` why it could not be computed."""
        return self.rewards.reasons

    def accuracy(self, samples: Sequence[Sample]) -> torch.Tensor:
        """Returns 1 for a right answer, else 0, [rollout]."""
        return self._accuracy.score(samples)[:, 0]

    def measures(self, samples: Sequence[Sample], group: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the length of the response in tokens, [rollout]."""
        return {"response/length": torch.tensor([float(s.response_length) for s in samples])}


class Sums:
    """`size` prompts such as `27+45=`, whose answer is the sum, with summands up to `largest`.

    Item i depends on (split, seed, i) and `largest`. Metadata: `kind` (carry or plain), and `demonstration`, the target
    response of supervised training: the sum, or in the share `wrong_share` the sum without its carry.
    """

    def __init__(self, split: Split, size: int, seed: int, largest: int, wrong_share: float = 0.0) -> None:
        self.split, self.size, self.seed, self.largest, self.wrong_share = split, size, seed, largest, wrong_share

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Prompt:
        """Returns sum `index`: a random pair of summands of the split, determined by the split, the seed and `index`.
        With the probability `wrong_share` its demonstration is the sum without carries."""
        if not 0 <= index < self.size:
            raise IndexError(f"index {index} is out of range: there are {self.size} prompts")
        rng = np.random.default_rng([SPLITS.index(self.split), self.seed, index])
        while True:
            a, b = (int(n) for n in rng.integers(0, self.largest + 1, 2))
            if held_out(a, b) == (self.split == "heldout"):
                break
        demonstration = without_carry(a, b) if rng.random() < self.wrong_share else a + b
        metadata = {"demonstration": str(demonstration), "kind": "carry" if without_carry(a, b) != a + b else "plain"}
        return Prompt(f"sums-{self.split}-{self.seed}-{index}", f"{a}+{b}=", answer=str(a + b), metadata=metadata)


def held_out(a: int, b: int) -> bool:
    """Returns whether a pair of summands is held out: about every fourth is, and so is (b, a) if (a, b) is."""
    low, high = sorted((a, b))
    return zlib.crc32(f"{low}+{high}".encode()) % 4 == 3


def without_carry(a: int, b: int) -> int:
    """Returns the sum without the carry from ones to tens: 27 and 45 give 62."""
    return a // 10 * 10 + b // 10 * 10 + (a + b) % 10 if a % 10 + b % 10 > 9 else a + b

"""Image generation from prompts: handwritten digits, scenes of shapes, or the user's own prompt files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from mmrl.rewards import RewardSet
from mmrl.rewards.guards import diversity, out_of_gamut, sharpness
from mmrl.rollouts import Prompt, Sample
from tasks.image_generation import digits, prompts, shapes
from tasks.image_generation.config import DigitsData, ImageGenerationConfig, PromptsData, ShapesData, parse
from tasks.image_generation.pictures import stack_pictures

__all__ = ["ImageGeneration", "ImageGenerationConfig", "Source", "build", "words"]


class Source(Protocol):
    """Prompts by index: the same index gives the same prompt."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Prompt: ...


class ImageGeneration:
    """A task: prompts to train on (None where it is only evaluated), prompts held out, rewards, accuracy and guards.

    Prompts of digits and shapes carry a picture to learn from, metadata["target"] [channel, height, width], 0 to 1.
    """

    def __init__(
        self,
        train: Source | None,
        evaluation: Source,
        rewards: RewardSet,
        accuracy: RewardSet,
        second_scorer: RewardSet | None = None,
    ):
        self.train, self.evaluation = train, evaluation
        self.reward_names, self.reward_weights = rewards.names, rewards.weights
        self._rewards, self._accuracy, self._second_scorer = rewards, accuracy, second_scorer

    def score(self, samples: Sequence[Sample], group: Tensor | None = None) -> Tensor:
        """Unweighted reward components [rollout, component], float32, NaN where one could not be scored.

        group: [rollout] int64, which prompt a rollout answers; without it, those of equal prompt ids are a group.
        """
        return self._rewards.score(samples, _groups(samples) if group is None else group)

    def accuracy(self, samples: Sequence[Sample]) -> Tensor:
        """What the scorer of the evaluation gives [rollout], float32, NaN where it could not tell."""
        return self._accuracy.score(samples, _groups(samples))[:, 0]

    def measures(self, samples: Sequence[Sample], group: Tensor | None = None) -> dict[str, Tensor]:
        """What would show that the reward is hacked, each [rollout] float32: see `mmrl.rewards.guards`.

        The second scorer, where there is one, has no part in the reward. Diversity is NaN for a group of one.
        """
        images, group = stack_pictures(samples), _groups(samples) if group is None else group
        guards = {
            "guard/out_of_gamut": out_of_gamut(images),
            "guard/sharpness": sharpness(images),
            "guard/diversity": diversity(images, group),
        }
        if self._second_scorer is not None:
            guards["guard/second_scorer"] = self._second_scorer.score(samples, group)[:, 0]
        return guards


def build(options: Mapping[str, Any], seed: int) -> ImageGeneration:
    """The task that `options` (see `ImageGenerationConfig`) describe; `seed` draws the prompts to train on.

    Raises ValueError in one line for a key or value that is not valid, and as the sources and rewards do.
    """
    config = parse(options)
    assert config.accuracy is not None
    second = None if config.second_scorer is None else RewardSet([config.second_scorer])
    train, evaluation = _sources(config.data, seed)
    return ImageGeneration(train, evaluation, RewardSet(config.rewards), RewardSet([config.accuracy]), second)


def words(kind: str) -> list[str]:
    """Every word of the prompts of `digits` or `shapes`, sorted: the vocabulary of a model that embeds words.

    Raises ValueError for another kind, whose words are the user's.
    """
    known = {"digits": digits.words, "shapes": shapes.words}
    if kind not in known:
        raise ValueError(f"only the words of {' and '.join(known)} are known beforehand, not those of {kind!r}")
    return known[kind]()


def _sources(data: DigitsData | ShapesData | PromptsData, seed: int) -> tuple[Source | None, Source]:
    if isinstance(data, DigitsData):
        return (
            digits.DigitsSource("train", size=data.train_size, seed=seed, careless=data.careless),
            digits.DigitsSource("heldout", size=data.eval_size, seed=data.eval_seed),
        )
    if isinstance(data, ShapesData):
        allowed: dict[str, Any] = data.model_dump(include={"kinds", "colours", "max_count", "layout"})
        return (
            shapes.ShapesSource(data.combinations, size=data.train_size, seed=seed, careless=data.careless, **allowed),
            shapes.ShapesSource("heldout", size=data.eval_size, seed=data.eval_seed, **allowed),
        )
    rows: dict[str, Any] = data.model_dump(include={"format", "max_bad_share"})
    train = None if data.train is None else prompts.load(data.train, **rows)
    if data.eval is None:
        assert train is not None and data.heldout is not None
        return prompts.hold_out(train, data.heldout)
    evaluation = prompts.load(data.eval, **rows)
    if train is not None:
        prompts.warn_of_overlap(train, evaluation)
    return train, evaluation


def _groups(samples: Sequence[Sample]) -> Tensor:
    numbers: dict[str, int] = {}
    return torch.tensor([numbers.setdefault(sample.prompt.id, len(numbers)) for sample in samples], dtype=torch.int64)

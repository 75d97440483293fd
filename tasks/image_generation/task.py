"""Image generation: prompts, rewards, accuracy and guards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mmrl.protocols.parts import Source
from mmrl.rewards import RewardSet
from mmrl.rewards.guards import diversity, out_of_gamut, sharpness
from mmrl.rollouts import Sample
from mmrl.tasks.image_generation.data import digits, shapes
from mmrl.tasks.image_generation.data.edits import untouched_moved
from mmrl.tasks.image_generation.data.images import stack_images
from mmrl.tasks.image_generation.settings import ImageGenerationSettings


class ImageGeneration:
    """A task: prompts to train on (None where it is only evaluated), prompts held out, rewards, accuracy and guards.

    Prompts of digits and shapes carry an image to learn from, metadata["target"] [channel, height, width], 0 to 1.
    """

    def __init__(
        self,
        train: Source | None,
        evaluation: Source,
        rewards: RewardSet,
        accuracy: RewardSet,
        second_scorer: RewardSet | None = None,
        *,
        edits: bool = False,
    ):
        self.train, self.evaluation = train, evaluation
        self.reward_names, self.reward_weights = rewards.names, rewards.weights
        self.rewards, self._accuracy, self._second_scorer = rewards, accuracy, second_scorer
        self._edits = edits

    @staticmethod
    def of(settings: ImageGenerationSettings, seed: int) -> ImageGeneration:
        """Builds the task that `settings` describe; seed: of the prompts to train on.

        Raises ValueError as the sources and rewards do.
        """
        data = settings.data
        accuracy, second = settings.accuracy or data.accuracy, settings.second_scorer or data.second_scorer
        assert accuracy is not None
        train, evaluation = data.sources(seed)
        rewards = RewardSet(settings.rewards or data.rewards)
        scorer = None if second is None else RewardSet([second])
        return ImageGeneration(train, evaluation, rewards, RewardSet([accuracy]), scorer, edits=data.edits)

    def score(self, samples: Sequence[Sample], group: Tensor | None = None) -> Tensor:
        """Returns unweighted reward components [rollout, component], float32, NaN where one could not be scored.

        group: [rollout] int64, which prompt a rollout answers; without it, those of equal prompt ids are a group.
        """
        return self.rewards.score(samples, _groups(samples) if group is None else group)

    def unscored_reasons(self) -> Mapping[str, str]:
        """Why a rollout was not scored, by reward."""
        return self.rewards.reasons

    def accuracy(self, samples: Sequence[Sample]) -> Tensor:
        """Returns the values of the evaluation's scorer [rollout], float32, NaN for what it could not score."""
        return self._accuracy.score(samples, _groups(samples))[:, 0]

    def measures(self, samples: Sequence[Sample], group: Tensor | None = None) -> dict[str, Tensor]:
        """Returns the guards, which move when the reward is hacked, each [rollout] float32: see `mmrl.rewards.guards`.

        The second scorer, where there is one, has no part in the reward. Diversity is NaN for a group of one.
        """
        images, group = stack_images(samples), _groups(samples) if group is None else group
        guards = {
            "guard/out_of_gamut": out_of_gamut(images),
            "guard/sharpness": sharpness(images),
            "guard/diversity": diversity(images, group),
        }
        if self._edits:
            guards["guard/untouched_moved"] = untouched_moved(samples)
        if self._second_scorer is not None:
            guards["guard/second_scorer"] = self._second_scorer.score(samples, group)[:, 0]
        return guards


def words(kind: str) -> list[str]:
    """Returns every word of the prompts of `digits` or `shapes`, sorted: the vocabulary of a model that embeds words.

    Raises ValueError for another kind, whose words are the user's.
    """
    vocabularies = {"digits": digits.words, "shapes": shapes.words}
    if kind not in vocabularies:
        raise ValueError(f"only the prompts of {' and '.join(vocabularies)} have a known vocabulary, not of {kind!r}")
    return vocabularies[kind]()


def _groups(samples: Sequence[Sample]) -> Tensor:
    numbers: dict[str, int] = {}
    return torch.tensor([numbers.setdefault(sample.prompt.id, len(numbers)) for sample in samples], dtype=torch.int64)

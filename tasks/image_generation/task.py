"""The task of image generation: prompts, rewards, accuracy and guards (metrics that reveal reward hacking)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mmrl.protocols.parts import Source
from mmrl.rewards import RewardSet
from mmrl.rewards.guards import diversity, out_of_gamut, sharpness
from mmrl.rollouts import Sample
from mmrl.tasks.image_generation.data import digits, shapes
from mmrl.tasks.image_generation.data.edits import unintended_changes
from mmrl.tasks.image_generation.data.images import stack_images
from mmrl.tasks.image_generation.settings import ImageGenerationSettings


class ImageGeneration:
    """The task: training prompts (None if it is only evaluated), held-out prompts, rewards, accuracy and guards.

    Synthetic prompts have an image for supervised training, metadata["target"] [channel, height, width], 0 to 1. edits:
    prompts have the images before and after an edit.
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
        """second_scorer: a reward that is only measured, as a guard; None: there is none. edits: whether prompts have
        images to edit."""
        self.train, self.evaluation = train, evaluation
        self.reward_names, self.reward_weights = rewards.names, rewards.weights
        self.rewards, self._accuracy, self._second_scorer = rewards, accuracy, second_scorer
        self._edits = edits

    @staticmethod
    def from_settings(settings: ImageGenerationSettings, seed: int) -> ImageGeneration:
        """Builds the task from its settings. seed: the random seed of the training prompts.

        Raises ValueError as the sources of prompts and the rewards do.
        """
        data = settings.data
        accuracy, second = settings.accuracy or data.accuracy, settings.second_scorer or data.second_scorer
        assert accuracy is not None
        train, evaluation = data.sources(seed)
        rewards = RewardSet(settings.rewards or data.rewards)
        scorer = None if second is None else RewardSet([second])
        return ImageGeneration(train, evaluation, rewards, RewardSet([accuracy]), scorer, edits=data.edits)

    def score(self, samples: Sequence[Sample], group: Tensor | None = None) -> Tensor:
        """Returns unweighted rewards [rollout, component], float32; NaN for one that could not be computed.

        group: [rollout] int64, the index of each rollout's prompt; None: rollouts of equal prompt ids are a group.
        """
        return self.rewards.score(samples, _groups(samples) if group is None else group)

    def unscored_reasons(self) -> Mapping[str, str]:
        """Returns for each reward with a NaN in the last `score` why it could not be computed."""
        return self.rewards.reasons

    def accuracy(self, samples: Sequence[Sample]) -> Tensor:
        """Returns the reward that evaluation reports [rollout], float32, NaN if it could not be computed."""
        return self._accuracy.score(samples, _groups(samples))[:, 0]

    def measures(self, samples: Sequence[Sample], group: Tensor | None = None) -> dict[str, Tensor]:
        """Returns the guards [rollout] float32 by name: metrics that change if the reward is hacked; see
        `mmrl.rewards.guards`. Diversity is NaN for a group of one rollout."""
        images, group = stack_images(samples), _groups(samples) if group is None else group
        guards = {
            "guard/out_of_gamut": out_of_gamut(images),
            "guard/sharpness": sharpness(images),
            "guard/diversity": diversity(images, group),
        }
        if self._edits:
            guards["guard/untouched_moved"] = unintended_changes(samples)
        if self._second_scorer is not None:
            guards["guard/second_scorer"] = self._second_scorer.score(samples, group)[:, 0]
        return guards


def words(kind: str) -> list[str]:
    """Returns all words of the prompts of "digits" or "shapes", sorted, as the vocabulary of a tiny model.

    Raises ValueError for other data, whose words are not known in advance.
    """
    vocabularies = {"digits": digits.words, "shapes": shapes.words}
    if kind not in vocabularies:
        raise ValueError(f"only the prompts of {' and '.join(vocabularies)} have a known vocabulary, not of {kind!r}")
    return vocabularies[kind]()


def _groups(samples: Sequence[Sample]) -> Tensor:
    """Returns the group of each sample, [sample] int64: samples with the same prompt id are a group."""
    groups: dict[str, int] = {}
    return torch.tensor([groups.setdefault(sample.prompt.id, len(groups)) for sample in samples], dtype=torch.int64)

"""Video generation: prompts, rewards, accuracy and guards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mmrl.protocols.parts import Source
from mmrl.rewards import RewardSet
from mmrl.rewards.guards import diversity, flicker, motion, out_of_gamut, sharpness, static
from mmrl.rollouts import Sample
from mmrl.tasks.video_generation.clips import stack_videos


class VideoGeneration:
    """A task: prompts to train on (None where it is only evaluated), prompts held out, rewards, accuracy and guards."""

    def __init__(self, train: Source | None, evaluation: Source, rewards: RewardSet, accuracy: RewardSet) -> None:
        self.train, self.evaluation = train, evaluation
        self.reward_names, self.reward_weights = rewards.names, rewards.weights
        self.rewards, self._accuracy = rewards, accuracy

    def score(self, samples: Sequence[Sample], group: Tensor | None = None) -> Tensor:
        """Returns unweighted reward components [rollout, component], float32, NaN where one could not be scored."""
        return self.rewards.score(samples, _groups(samples) if group is None else group)

    def unscored_reasons(self) -> Mapping[str, str]:
        """Why a rollout was not scored, by reward."""
        return self.rewards.reasons

    def accuracy(self, samples: Sequence[Sample]) -> Tensor:
        """Returns the values of the evaluation's scorer [rollout], float32, NaN for what it could not score."""
        return self._accuracy.score(samples, _groups(samples))[:, 0]

    def measures(self, samples: Sequence[Sample], group: Tensor | None = None) -> dict[str, Tensor]:
        """Returns the guards, which move when the reward is hacked, each [rollout] float32: see `mmrl.rewards.guards`.
        Sharpness is the mean of the frames'; diversity is NaN for a group of one."""
        videos, group = stack_videos(samples), _groups(samples) if group is None else group
        count, frames = videos.shape[:2]
        return {
            "guard/static": static(videos),
            "guard/motion": motion(videos),
            "guard/flicker": flicker(videos),
            "guard/out_of_gamut": out_of_gamut(videos),
            "guard/sharpness": sharpness(videos.flatten(0, 1)).view(count, frames).mean(1),
            "guard/diversity": diversity(videos, group),
        }


def _groups(samples: Sequence[Sample]) -> Tensor:
    numbers: dict[str, int] = {}
    return torch.tensor([numbers.setdefault(sample.prompt.id, len(numbers)) for sample in samples], dtype=torch.int64)

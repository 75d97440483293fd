"""The task of video generation: prompts, rewards, accuracy and guards (metrics that reveal reward hacking)."""

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
    """The task: training prompts (None if it is only evaluated), held-out prompts, rewards, accuracy and guards."""

    def __init__(self, train: Source | None, evaluation: Source, rewards: RewardSet, accuracy: RewardSet) -> None:
        self.train, self.evaluation = train, evaluation
        self.reward_names, self.reward_weights = rewards.names, rewards.weights
        self.rewards, self._accuracy = rewards, accuracy

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
        `mmrl.rewards.guards`. Sharpness is averaged over frames. Diversity is NaN for a group of one rollout."""
        videos, group = stack_videos(samples), _groups(samples) if group is None else group
        num_videos, num_frames = videos.shape[:2]
        return {
            "guard/static": static(videos),
            "guard/motion": motion(videos),
            "guard/flicker": flicker(videos),
            "guard/out_of_gamut": out_of_gamut(videos),
            "guard/sharpness": sharpness(videos.flatten(0, 1)).view(num_videos, num_frames).mean(1),
            "guard/diversity": diversity(videos, group),
        }


def _groups(samples: Sequence[Sample]) -> Tensor:
    """Returns the group of each sample, [sample] int64: samples with the same prompt id are a group."""
    groups: dict[str, int] = {}
    return torch.tensor([groups.setdefault(sample.prompt.id, len(groups)) for sample in samples], dtype=torch.int64)

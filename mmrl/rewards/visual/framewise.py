"""Applies a reward of images to videos: each frame is scored by itself, and the scores are pooled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from mmrl.errors import UserError
from mmrl.rewards.types import BatchReward, Reward, Score, load_object, to_scores, video_of
from mmrl.rollouts import Sample

Pool = Literal["mean", "least", "last"]


class Framewise:
    """A reward of images, applied to every `every`-th frame of a video, beginning with the first.

    reward, options: a reward of `mmrl.rewards.REWARDS` or a custom one. pool: "mean" of the frames' scores, "least" for
    the smallest, or "last" for the last frame alone. None if a frame could not be scored. A still video gets the score
    of its image; add a guard of motion against that.
    """

    scope: Literal["sample"] = "sample"

    def __init__(
        self, *, reward: str, options: dict[str, Any] | None = None, pool: Pool = "mean", every: int = 1
    ) -> None:
        if pool not in ("mean", "least", "last"):
            raise ValueError(f"pool must be mean, least or last, not {pool!r}")
        if every < 1:
            raise ValueError(f"every must be at least 1, not {every}")
        self.reward: Reward | BatchReward = load_object("mmrl.rewards.registry:build")(reward, options)
        if isinstance(self.reward, BatchReward) and self.reward.scope != "sample":
            raise ValueError(
                f"reward {reward!r} compares the rollouts of a group, so it cannot score single frames; name another"
            )
        self.pool, self.every = pool, every

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        """Scores every `every`-th frame of each video, or with pool="last" the last one, in one call of the image
        reward, and pools the scores of a video's frames. Raises UserError for a video without frames."""
        frames = [list(video_of(sample)[:: self.every]) for sample in samples]
        empty = next((sample.prompt.id for sample, images in zip(samples, frames, strict=True) if not images), None)
        if empty is not None:
            raise UserError(f"the video of prompt {empty!r} has no frames, so it cannot be scored")
        if self.pool == "last":
            frames = [[video_of(sample)[-1]] for sample in samples]
        flat = []
        for sample, images in zip(samples, frames, strict=True):
            flat += [replace(sample, image=image, frames=None) for image in images]
        if isinstance(self.reward, BatchReward):
            values = to_scores(self.reward.score(flat), len(flat))
        else:
            values = to_scores([self.reward(frame) for frame in flat], len(flat))
        scores, remaining = [], iter(values)
        for images in frames:
            scores.append(self._pool([next(remaining) for _ in images]))
        return scores

    def _pool(self, values: Sequence[Score]) -> Score:
        """Reduces the scores of a video's frames to one, the least or the mean; with pool="last" there is only one.
        Returns None if a frame could not be scored."""
        scored = [value for value in values if value is not None]
        if len(scored) < len(values):
            return None
        return min(scored) if self.pool == "least" else sum(scored) / len(scored)

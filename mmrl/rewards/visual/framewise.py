"""Rewards of images for videos: each frame is scored by itself, and the scores are pooled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from mmrl.errors import UserError
from mmrl.rewards.types import BatchReward, Reward, Score, load_object, to_scores, video_of
from mmrl.rollouts import Sample

Pool = Literal["mean", "least", "last"]


class Framewise:
    """A reward of images over every `every`-th frame of a video, from the first on.

    reward: of `mmrl.rewards.REWARDS` or a custom one, with its `options`. pool: "mean" of the frames' scores, the
    "least" of them, or that of the "last" frame alone. None where a frame that counts could not be scored. A still
    video gets the score of its image: add a guard of motion.
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
            raise ValueError(f"reward {reward!r} compares a group; its frames can not be scored by themselves")
        self.pool, self.every = pool, every

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        frames = [list(video_of(sample)[:: self.every]) for sample in samples]
        if self.pool == "last":
            frames = [[video_of(sample)[-1]] for sample in samples]
        flat = [replace(s, image=one, frames=None) for s, of in zip(samples, frames, strict=True) for one in of]
        if isinstance(self.reward, BatchReward):
            values = to_scores(self.reward.score(flat), len(flat))
        else:
            values = to_scores([self.reward(one) for one in flat], len(flat))
        if not all(frames):
            raise UserError("a video without frames can not be scored")
        scores, at = [], iter(values)
        for of in frames:
            scores.append(self._pooled([next(at) for _ in of]))
        return scores

    def _pooled(self, values: Sequence[Score]) -> Score:
        scored = [value for value in values if value is not None]
        if len(scored) < len(values):
            return None
        return min(scored) if self.pool == "least" else sum(scored) / len(scored)

"""Success as a vision-language model sees it, beside the simulator's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal
from weakref import ref

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mmrl.errors import UserError
from mmrl.rewards.judges.visual import JudgeQuestion, JudgeReward
from mmrl.rewards.types import Score
from mmrl.rollouts import Episode, Sample
from mmrl.tasks.manipulation.rewards import episode_of

QUESTION = (
    "These images show a robot at work, in order; the last one shows how it ended. "
    'Was this done: "{prompt}"? Answer with one word, yes or no.'
)


class SuccessJudge(JudgeReward):
    """Reward: P(yes) / (P(yes) + P(no)) of a judge that is shown images of an episode and asked whether its instruction
    was followed; 0 to 1, None for an episode that the simulator lost and where the judge gives neither word any
    probability.

    images: of each episode, evenly spaced from its start to its end; 1: its end alone. threshold: the reward is 1
    from this probability on and 0 below it; None: the probability itself. {prompt} in `question` is the instruction.
    The other options are those of `mmrl.rewards.judges.visual.JudgeReward`. Images are those that the policy sees; they
    are kept of every policy step while training and of every action while evaluating.
    """

    scope: Literal["sample"] = "sample"

    def __init__(
        self,
        *,
        images: int = 2,
        threshold: float | None = None,
        question: str = QUESTION,
        answers: Sequence[str] = ("yes", "no"),
        **judge: Any,
    ):
        if images < 1:
            raise ValueError(f"images must be at least 1, not {images}")
        if threshold is not None and not 0 < threshold <= 1:
            raise ValueError(f"threshold must be above 0 and at most 1, not {threshold}")
        super().__init__(question=question, answers=answers, **judge)
        self.images, self.threshold = images, threshold
        self._scores: dict[
            int, tuple[ref[Episode], Score]
        ] = {}  # by id, while the episode lives: measures ask for it once more

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        probabilities = self.probabilities(samples)
        if self.threshold is None:
            return probabilities
        return [None if p is None else float(p >= self.threshold) for p in probabilities]

    def verdicts(self, samples: Sequence[Sample]) -> list[bool | None]:
        """Returns whether the judge takes each episode for a success; None where it has no score."""
        least = 0.5 if self.threshold is None else self.threshold
        return [None if p is None else p >= least for p in self.probabilities(samples)]

    def probabilities(self, samples: Sequence[Sample]) -> list[Score]:
        episodes = [_watched_episode(sample) for sample in samples]
        self._scores = {key: cached for key, cached in self._scores.items() if cached[0]() is not None}
        new = [e for e in episodes if not e.lost and id(e) not in self._scores]
        answers = self.judge.ask([self._episode_question(e) for e in new], self.answers) if new else []
        for episode, (yes, no) in zip(new, answers, strict=True):
            self._scores[id(episode)] = ref(episode), yes / (yes + no) if yes + no > 0 else None
        return [None if e.lost else self._scores[id(e)][1] for e in episodes]

    def _episode_question(self, episode: Episode) -> JudgeQuestion:
        assert episode.frames is not None
        shown = evenly(episode.frames, self.images)
        return JudgeQuestion(
            tuple(Image.fromarray(frame) for frame in shown), self.question.replace("{prompt}", episode.instruction)
        )


def evenly(frames: NDArray[np.uint8], count: int) -> NDArray[np.uint8]:
    """Returns at most `count` of [frame, ...]: the last one, and others evenly from the first one on."""
    return frames[np.unique(np.linspace(len(frames) - 1, 0, count).round().astype(int))]


def _watched_episode(sample: Sample) -> Episode:
    episode = episode_of(sample)
    if episode.frames is None and not episode.lost:
        raise UserError(f"the episode of prompt {sample.prompt.id!r} was played without keeping images")
    return episode

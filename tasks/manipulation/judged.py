"""Rewards from a vision-language model that judges an episode, or each of its observations, by images."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal
from weakref import ref

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mmrl.errors import UserError
from mmrl.rewards.judges.visual import JudgeQuestion, TwoWordJudgeReward
from mmrl.rewards.types import Score
from mmrl.rollouts import Episode, Sample, Spans
from mmrl.tasks.manipulation.rewards import episode_of

QUESTION = (
    "These images show a robot at work, in order; the last one shows how it ended. "
    'Was this done: "{prompt}"? Answer with one word, yes or no.'
)


class SuccessJudge(TwoWordJudgeReward):
    """Reward: P(yes) / (P(yes) + P(no)) of a vision-language model that sees images of an episode and is asked whether
    the instruction was followed. None if the simulator failed, or if the model gives both answers the probability 0.

    images: the number of images of each episode, evenly spaced from start to end; 1: the last one only. threshold: the
    reward is 1 if the probability is at least this, else 0; None: the reward is the probability. question: its {prompt}
    is replaced by the instruction. Other options: see `mmrl.rewards.judges.visual.TwoWordJudgeReward`. The images
    are those that the policy observes: one for each policy step in training, one for each action in evaluation.
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
        # The probability of each episode, by its id while it exists: rewards and metrics both ask for it.
        self._scores: dict[int, tuple[ref[Episode], Score]] = {}

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        """Returns the judge's probabilities of success, or with `threshold` 1 or 0; None for an episode without
        one, see `probabilities`."""
        probabilities = self.probabilities(samples)
        if self.threshold is None:
            return probabilities
        return [None if p is None else float(p >= self.threshold) for p in probabilities]

    def verdicts(self, samples: Sequence[Sample]) -> list[bool | None]:
        """Returns whether the judge considers each episode a success; None if it has no score."""
        threshold = 0.5 if self.threshold is None else self.threshold
        return [None if p is None else p >= threshold for p in self.probabilities(samples)]

    def probabilities(self, samples: Sequence[Sample]) -> list[Score]:
        """Returns the judge's probability that each episode succeeded, 0 to 1; None if the simulator failed, or
        the judge gives neither answer a probability. Asks the judge once for each episode. Raises
        UserError if an episode has no images."""
        episodes = [_episode_with_images(sample) for sample in samples]
        # Episodes that no longer exist are removed, as a new one may have the same id.
        self._scores = {key: cached for key, cached in self._scores.items() if cached[0]() is not None}
        new = [e for e in episodes if not e.lost and id(e) not in self._scores]
        answers = self.judge.ask([self._episode_question(e) for e in new], self.answers) if new else []
        for episode, (yes, no) in zip(new, answers, strict=True):
            self._scores[id(episode)] = ref(episode), yes / (yes + no) if yes + no > 0 else None
        return [None if e.lost else self._scores[id(e)][1] for e in episodes]

    def _episode_question(self, episode: Episode) -> JudgeQuestion:
        """Returns the question about an episode, with its images."""
        assert episode.frames is not None
        frames = evenly_spaced(episode.frames, self.images)
        return JudgeQuestion(
            tuple(Image.fromarray(frame) for frame in frames), self.question.replace("{prompt}", episode.instruction)
        )


PROGRESS = 'This image shows a robot at work. Is this done in it: "{prompt}"? Answer with one word, yes or no.'


class ProgressJudge(TwoWordJudgeReward):
    """Reward of each policy step: how much P(yes) / (P(yes) + P(no)) of a vision-language model rises from the
    observation before the step to the one after it, where the model is asked whether the instruction is fulfilled (a
    process reward of VLA-RL's kind, arXiv 2505.18719). The reward of the episode is the last probability.

    `algorithm.type=ppo` with `step_rewards` adds these rewards to the simulator's; other algorithms use the shaper
    `span_returns` with `of: policy_steps`. None if the simulator failed, or if the model gives both answers the
    probability 0 at some observation. question: its {prompt} is replaced by the instruction. Other options: see
    `mmrl.rewards.judges.visual.TwoWordJudgeReward`.
    """

    scope: Literal["sample"] = "sample"

    def __init__(self, *, question: str = PROGRESS, answers: Sequence[str] = ("yes", "no"), **judge: Any):
        super().__init__(question=question, answers=answers, **judge)

    def score(self, samples: Sequence[Sample]) -> list[Score | Spans]:
        """Returns the rewards of the policy steps of each episode. Asks the judge once for each observation. Raises
        UserError if an episode has no images."""
        episodes = [_episode_with_images(sample) for sample in samples]
        questions = [
            JudgeQuestion((Image.fromarray(frame),), self.question.replace("{prompt}", episode.instruction))
            for episode in episodes
            for frame in _frames(episode)
        ]
        answers = iter(self.judge.ask(questions, self.answers) if questions else [])
        return [self._of_episode([next(answers) for _ in _frames(episode)]) for episode in episodes]

    def _of_episode(self, answers: Sequence[tuple[float, float]]) -> Score | Spans:
        """Returns the rewards of an episode from the probabilities of yes and no at its observations."""
        if not answers or any(yes + no <= 0 for yes, no in answers):
            return None
        done = [yes / (yes + no) for yes, no in answers]
        rises = [(t, t + 1, after - before) for t, (before, after) in enumerate(pairwise(done))]
        return Spans(rises, total=done[-1], unit="policy_steps")


def _frames(episode: Episode) -> Sequence[NDArray[np.uint8]]:
    """Returns the images of an episode; none if the simulator failed."""
    return () if episode.lost or episode.frames is None else list(episode.frames)


def evenly_spaced(frames: NDArray[np.uint8], max_frames: int) -> NDArray[np.uint8]:
    """Returns at most `max_frames` evenly spaced frames of [frame, ...], among them the last one."""
    # from the last frame backwards, so that one frame is the last one; `unique` sorts the indices
    return frames[np.unique(np.linspace(len(frames) - 1, 0, max_frames).round().astype(int))]


def _episode_with_images(sample: Sample) -> Episode:
    """Returns the episode of a sample. Raises UserError if it has no images and the simulator did not fail."""
    episode = episode_of(sample)
    if episode.frames is None and not episode.lost:
        raise UserError(
            f"the episode of prompt {sample.prompt.id!r} has no images, which its judge needs; use a "
            "simulator that returns images"
        )
    return episode

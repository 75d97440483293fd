"""Soft-TIFA, the measure of GenEval 2 (Kamath et al. 2025, arXiv:2512.16853): questions about parts of the prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

from mmrl.errors import UserError
from mmrl.rewards.judges.visual import JudgeQuestion, JudgeReward
from mmrl.rewards.types import Score, as_pil, image_of, score_finite
from mmrl.rollouts import Sample

ONE_WORD = "{question} Answer with one word."
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
DIGITS = {word: str(number) for number, word in enumerate(NUMBERS)}


class SoftTifa(JudgeReward):
    """The mean of the probabilities, 0 to 1, that a judge gives to the right answers of questions about an image.

    The questions of a prompt are its metadata under `key`, a list of [question, answer], as in GenEval 2's file. An
    answer is one word, compared without case; for "two", "2" counts too. mean: geometric (the image as a whole) or
    arithmetic (its parts). None for an image with NaN or inf. score() raises UserError for a prompt without questions.
    The other options are those of `JudgeReward`.
    """

    scope: Literal["sample"] = "sample"

    def __init__(
        self,
        *,
        key: str = "vqa_list",
        mean: Literal["geometric", "arithmetic"] = "geometric",
        question: str = ONE_WORD,
        **judge: Any,
    ) -> None:
        if "{question}" not in question:
            raise ValueError("question must contain {question}, which each question of a prompt replaces")
        if mean not in ("geometric", "arithmetic"):
            raise ValueError(f"mean must be geometric or arithmetic, not {mean!r}")
        super().__init__(**judge)
        self.key, self.mean, self.template = key, mean, question

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        return score_finite(samples, self._score)

    def _score(self, samples: list[Sample]) -> list[Score]:
        """Returns for each sample the mean probability that the judge gives to the right answers of its questions."""
        by_answer: dict[str, list[tuple[int, JudgeQuestion]]] = {}  # a judge is asked for one pair of words at a time
        for row, sample in enumerate(samples):
            image = as_pil(image_of(sample))
            for question, answer in self._questions(sample):
                judge_question = JudgeQuestion((image,), self.template.replace("{question}", question))
                by_answer.setdefault(answer, []).append((row, judge_question))
        probabilities: list[list[float]] = [[] for _ in samples]
        for answer, questions in by_answer.items():
            words = (answer, DIGITS.get(answer, answer))
            # pairs: the probabilities of "two" and "2"; if the answer is not a number, both words are the answer
            pairs = self.judge.ask([question for _, question in questions], words)
            for (row, _), (word, digit) in zip(questions, pairs, strict=True):
                probabilities[row].append(min(1.0, word + digit) if words[0] != words[1] else word)
        return [self._reduce(values) for values in probabilities]

    def _questions(self, sample: Sample) -> list[tuple[str, str]]:
        """Returns the questions of a prompt with their answers in lower case. Raises UserError if there are none."""
        rows = sample.prompt.metadata.get(self.key)
        valid = isinstance(rows, list | tuple) and all(isinstance(row, list | tuple) and len(row) == 2 for row in rows)
        if not rows or not valid:
            raise UserError(
                f"prompt {sample.prompt.id!r} has no list of [question, answer] in its metadata as {self.key!r}; add "
                "one to its row, or set the option key to the key that holds it"
            )
        return [(str(question), str(answer).strip().lower()) for question, answer in rows]

    def _reduce(self, values: list[float]) -> float:
        """Returns the mean of an image's probabilities; the geometric mean is 0 if one of them is 0."""
        if self.mean == "arithmetic":
            return sum(values) / len(values)
        return math.exp(sum(map(math.log, values)) / len(values)) if min(values) > 0 else 0.0

"""Judges that write a verdict in words: a number after a text, as UnifiedReward, or true and false, as OmniVerifier."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from mmrl.rewards.judges.visual import JudgeQuestion, JudgeReward
from mmrl.rewards.types import Score, as_pil, image_of, score_finite
from mmrl.rollouts import Sample

HOW_GOOD = (
    'How well does this image show "{prompt}", and how good is its quality? Give reasons, then a number from 1 to 5 '
    'after "Final Score:".'
)
NUMBER = r"[-+]?\d{1,9}(?:\.\d{1,9})?"


class WrittenScore(JudgeReward):
    """The number, `low` .. `high`, that a judge writes about an image, scaled to 0 .. 1.

    The answer is what follows the last `after` in the judge's text, without white space, brackets, quotes and asterisks
    before it. words: values, 0 to 1, of the words that may be there in place of a number, such as {true: 1, false: 0}.
    UnifiedReward (arXiv:2503.05236) writes "Final Score:" and 1 to 5, OmniVerifier (arXiv:2510.13804) JSON with
    "answer": true or false.

    The judge writes at most `max_tokens` tokens, the most probable ones. source: whether it sees the prompt's images
    before the generated one. None for an answer without such a number or word, for a number outside of low .. high, and
    for an image with NaN or inf. The other options are those of `JudgeReward`.
    """

    scope: Literal["sample"] = "sample"

    def __init__(
        self,
        *,
        question: str = HOW_GOOD,
        after: str = "Final Score:",
        low: float = 1.0,
        high: float = 5.0,
        words: Mapping[str | bool, float] | None = None,
        source: bool = False,
        max_tokens: int = 512,
        **judge: Any,
    ) -> None:
        if "{prompt}" not in question:
            raise ValueError("question must contain {prompt}, which the prompt's text replaces")
        if not after:
            raise ValueError("after must be the text before the number, not an empty string")
        if not high > low:
            raise ValueError(f"high must be above low, not {high:g} with low {low:g}")
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {max_tokens}")
        self.question, self.after, self.low, self.high = question, after, low, high
        # YAML reads true and false as booleans
        self.words = {str(word).lower(): float(value) for word, value in (words or {}).items()}
        self.source, self.max_tokens = source, max_tokens
        super().__init__(**judge)
        self._verdict = verdict_pattern(self.words)

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        return score_finite(samples, self._score)

    def _score(self, samples: list[Sample]) -> list[Score]:
        questions = [self._build_question(sample) for sample in samples]
        return [self.read(text) for text in self.judge.write(questions, self.max_tokens)]

    def _build_question(self, sample: Sample) -> JudgeQuestion:
        before = tuple(image.convert("RGB") for image in sample.prompt.images) if self.source else ()
        text = self.question.replace("{prompt}", sample.prompt.text)
        return JudgeQuestion((*before, as_pil(image_of(sample))), text)

    def read(self, text: str) -> Score:
        """Returns the value of a judge's text; None if it has none."""
        _, marker, tail = text.rpartition(self.after)
        verdict = self._verdict.match(tail) if marker else None
        if verdict is None:
            return None
        if self.words:
            return self.words[verdict[1].lower()]
        number = float(verdict[1])
        return (number - self.low) / (self.high - self.low) if self.low <= number <= self.high else None


def verdict_pattern(words: Iterable[str]) -> re.Pattern[str]:
    """Returns the pattern of a number, or of one of the words, after brackets and the like, and not as the beginning of
    a longer one."""
    verdicts = "|".join(map(re.escape, words)) or NUMBER
    return re.compile(rf"[\s*\"'\[({{]{{0,16}}({verdicts})(?!\w|\.\d)", re.IGNORECASE)

"""Judges of responses: by a reference answer, by criteria, or by the consistency of reasoning, caption, answer and
image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from PIL import Image

from mmrl.errors import UserError
from mmrl.rewards.judges.visual import JudgeQuestion, TwoWordJudgeReward
from mmrl.rewards.parsing.responses import extract_answer, full_response, split_thoughts
from mmrl.rewards.types import Score
from mmrl.rollouts import Prompt, Sample

YES_OR_NO = "Answer with one word, yes or no."
IS_IT_RIGHT = f"Question: {{prompt}}\nReference answer: {{gold}}\nAnswer: {{answer}}\nIs the answer right? {YES_OR_NO}"
IS_IT_MET = f"Question: {{prompt}}\nResponse: {{response}}\nCriterion: {{criterion}}\nIs it met? {YES_OR_NO}"
DOES_IT_FOLLOW = (
    f"Question: {{prompt}}\nReasoning: {{thinking}}\nAnswer: {{answer}}\nDoes the answer follow from the reasoning? "
    f"{YES_OR_NO}"
)
IS_IT_ENOUGH = (
    f"Description of an image: {{caption}}\nQuestion about it: {{prompt}}\nAnswer: {{gold}}\nDoes the description "
    f"alone lead to this answer? {YES_OR_NO}"
)
IS_IT_SEEN = (
    f"Question: {{prompt}}\nReasoning: {{thinking}}\nIs everything that the reasoning says of the image to be seen "
    f"in it? {YES_OR_NO}"
)


class TextJudge(TwoWordJudgeReward):
    """P(yes) / (P(yes) + P(no)), 0 to 1, of a judge's answer to a question about a response.

    question: contains {prompt} and any of {response}, {answer} (extracted), {thinking} (up to </think>), {caption}
    (inside <info>), {gold} (the prompt's answer) and {criterion}. images: whether the judge sees the prompt's images,
    and after them its videos, as `frames` images each, evenly spaced from the first to the last. A response that lacks
    the {thinking} or {caption} of the question gets 0. None if the judge gives neither word any probability.
    """

    scope: Literal["sample"] = "sample"
    default_question: str = IS_IT_RIGHT
    sees_images: bool = False  # default of the option `images`

    def __init__(
        self,
        *,
        question: str | None = None,
        images: bool | None = None,
        frames: int = 8,
        answers: Sequence[str] = ("yes", "no"),
        **judge: Any,
    ) -> None:
        super().__init__(question=self.default_question if question is None else question, answers=answers, **judge)
        if frames < 2:
            raise ValueError(f"frames must be at least 2, the first and the last of a video, not {frames}")
        self.images, self.frames = self.sees_images if images is None else images, frames

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        """Returns for each sample the weighted mean of P(yes) / (P(yes) + P(no)) over its criteria, with one question
        to the judge for each; a criterion is left out if the response lacks a part that its question needs. All
        questions go to the judge in one call."""
        questions: list[JudgeQuestion] = []
        sample_questions: list[list[tuple[int, float]]] = []  # for each sample: indices and weights of its questions
        for sample in samples:
            indices = []
            for criterion, weight in self.criteria(sample):
                if (text := self._fill_question(sample, criterion)) is not None:
                    indices.append((len(questions), weight))
                    questions.append(JudgeQuestion(self._visible_images(sample.prompt) if self.images else (), text))
            sample_questions.append(indices)
        verdicts = [yes / (yes + no) if yes + no > 0 else None for yes, no in self.judge.ask(questions, self.answers)]
        return [self._mean([(verdicts[index], weight) for index, weight in indices]) for indices in sample_questions]

    def _visible_images(self, prompt: Prompt) -> tuple[Image.Image, ...]:
        """Returns the prompt's images, and evenly spaced frames of its videos."""
        videos = (evenly_spaced(video.frames, self.frames) for video in prompt.videos)
        return (*prompt.images, *(frame for video in videos for frame in video))

    def criteria(self, sample: Sample) -> list[tuple[str, float]]:
        """Returns the criteria of a sample with their weights; by default one empty criterion."""
        return [("", 1.0)]

    def _mean(self, verdicts: list[tuple[Score, float]]) -> Score:
        """Returns the weighted mean of (verdict, weight): 0 without any, None if a verdict is missing."""
        if not verdicts:
            return 0.0
        judged = [(value, weight) for value, weight in verdicts if value is not None]
        total = sum(weight for _, weight in judged)
        return sum(value * weight for value, weight in judged) / total if len(judged) == len(verdicts) else None

    def _fill_question(self, sample: Sample, criterion: str) -> str | None:
        """Returns the question with its fields filled in; None if it contains {thinking} or {caption} and the response
        has no such part. Raises UserError if it contains {gold} and the prompt has no answer."""
        gold = sample.prompt.answer
        if "{gold}" in self.question and gold is None:
            raise UserError(
                f"prompt {sample.prompt.id!r} has no answer, but the judge's question contains {{gold}}; give its row "
                "an answer"
            )
        parts = {
            "prompt": sample.prompt.text.replace("<image>", "").replace("<video>", "").strip(),
            "response": sample.response,
            "answer": extract_answer(full_response(sample)),
            "thinking": split_thoughts(full_response(sample))[0].strip(),
            "caption": _tag_content(sample.response, "info"),
            "gold": ", ".join(map(str, gold)) if isinstance(gold, list | tuple) else str(gold),
            "criterion": criterion,
        }
        if any("{" + name + "}" in self.question and not parts[name] for name in ("thinking", "caption")):
            return None
        pieces = self.question.split("{")  # not str.format: responses may contain braces
        text = pieces[0]
        for piece in pieces[1:]:
            name, closed, tail = piece.partition("}")
            text += parts[name] + tail if closed and name in parts else "{" + piece
        return text


class AnswerJudge(TextJudge):
    """The probability, given by a judge, that the answer is right, given the reference answer; see `TextJudge`."""


class RubricJudge(TextJudge):
    """The weighted share of criteria that a response meets, with one question to the judge for each.

    criteria: a list of strings, or of [text, weight]. criteria_key: instead, the key of the prompts' metadata that
    holds such a list. Rubrics as Rewards (arXiv:2507.17746), explicit aggregation. The other options are those of
    `TextJudge`.
    """

    default_question = IS_IT_MET

    def __init__(self, *, criteria: Sequence[Any] | None = None, criteria_key: str | None = None, **judge: Any) -> None:
        if (criteria is None) == (criteria_key is None):
            raise ValueError(
                "set either criteria or criteria_key, the key of the prompts' metadata that holds criteria; "
                f"{'neither is' if criteria is None else 'both are'} set"
            )
        self.fixed_criteria, self.criteria_key = None if criteria is None else _with_weights(criteria), criteria_key
        super().__init__(**judge)
        if "{criterion}" not in self.question:
            raise ValueError("question must contain {criterion}, which each criterion replaces")

    def criteria(self, sample: Sample) -> list[tuple[str, float]]:
        """Returns the criteria of a sample with their weights: the fixed ones, or those in the prompt's metadata.
        Raises UserError if the metadata has none."""
        if self.fixed_criteria is not None:
            return self.fixed_criteria
        criteria = sample.prompt.metadata.get(self.criteria_key or "")
        if not criteria:
            raise UserError(
                f"prompt {sample.prompt.id!r}: its metadata has no criteria at the key {self.criteria_key!r}; add "
                "them to its row"
            )
        return _with_weights(criteria)


class ConsistencyJudge(TextJudge):
    """The probability, given by a judge, that the answer follows from the reasoning, right or not (the think-answer
    consistency of TACO); see `TextJudge`."""

    default_question = DOES_IT_FOLLOW


class CaptionJudge(TextJudge):
    """The probability, given by a judge without the image, that the caption in <info> leads to the right answer; see
    `TextJudge`. It is the caption reward of Visionary-R1, with a verdict in place of the judge's own answer."""

    default_question = IS_IT_ENOUGH


class EvidenceJudge(TextJudge):
    """The probability, given by a judge that sees the image, that the reasoning's statements about it are true; see
    `TextJudge`. It is the semantic consistency of VideoRFT, with a verdict in place of an embedding."""

    default_question = IS_IT_SEEN
    sees_images = True


def evenly_spaced(frames: Sequence[Image.Image], num_frames: int) -> list[Image.Image]:
    """Returns `num_frames` frames, 2 or more, evenly spaced from the first to the last; all if there are no more."""
    if len(frames) <= num_frames:
        return list(frames)
    return [frames[round(index * (len(frames) - 1) / (num_frames - 1))] for index in range(num_frames)]


def _with_weights(criteria: Sequence[Any]) -> list[tuple[str, float]]:
    """Returns criteria with their weights, 1 for a plain string. Raises ValueError for anything but a string, or a pair
    of a string and a positive weight, and for an empty list."""
    weighed = []
    for criterion in criteria:
        text, weight = (criterion, 1.0) if isinstance(criterion, str) else (criterion[0], float(criterion[1]))
        if not isinstance(text, str) or weight <= 0:
            raise ValueError(
                f"criteria: each must be a string, or [string, weight] with a weight above 0, not {criterion!r}"
            )
        weighed.append((text, weight))
    if not weighed:
        raise ValueError("criteria: the list is empty; give at least one criterion")
    return weighed


def _tag_content(response: str, tag: str) -> str:
    """Returns the text in the first pair of `tag`, stripped; "" if there is none."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    begin = response.find(opening)
    end = response.find(closing, begin)
    return response[begin + len(opening) : end].strip() if 0 <= begin < end else ""

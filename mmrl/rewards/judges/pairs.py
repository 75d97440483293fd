"""Judges of a generated image beside an image of its prompt: a reference, or the source that was edited."""

from __future__ import annotations

from typing import Any

from PIL import Image

from mmrl.errors import UserError
from mmrl.rewards.judges.visual import JudgeQuestion, VlmJudge
from mmrl.rewards.types import as_pil, image_of
from mmrl.rollouts import Sample

IS_IT_BETTER = (
    'The first image was made for "{prompt}". Does it show that better than the second image? Answer with one word, '
    "yes or no."
)
IS_IT_EDITED = (
    'The second image was made from the first by the instruction "{prompt}". Was the instruction followed, and is all '
    "else as it was? Answer with one word, yes or no."
)


class ReferenceJudge(VlmJudge):
    """P(yes) of a judge that is asked whether the generated image is better than the prompt's first one, its reference
    (RewardDance, Wu et al. 2025, arXiv:2509.08826); the options are those of `vlm_judge`."""

    def __init__(self, *, question: str = IS_IT_BETTER, normalise: bool = False, **judge: Any) -> None:
        super().__init__(question=question, normalise=normalise, **judge)

    def _question_of(self, sample: Sample) -> JudgeQuestion:
        return self._question(sample, as_pil(image_of(sample)), image_of_prompt(sample, "as a reference"))


class EditJudge(VlmJudge):
    """P(yes) / (P(yes) + P(no)) of a judge that sees the prompt's first image, the source, and then the edited one,
    and is asked whether the instruction was followed and all else is as it was; 0 to 1.

    Two of them, each with a `question`, score the edit and what stays apart. The other options are those of
    `vlm_judge`.
    """

    def __init__(self, *, question: str = IS_IT_EDITED, **judge: Any) -> None:
        super().__init__(question=question, **judge)

    def _question_of(self, sample: Sample) -> JudgeQuestion:
        return self._question(sample, image_of_prompt(sample, "that was edited"), as_pil(image_of(sample)))


def image_of_prompt(sample: Sample, role: str) -> Image.Image:
    """Returns the prompt's first image. role: what it is for, in the UserError where there is none."""
    if not sample.prompt.images:
        raise UserError(f"prompt {sample.prompt.id!r} has no image {role}")
    return sample.prompt.images[0]

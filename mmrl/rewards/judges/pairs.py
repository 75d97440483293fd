"""Judges of a generated image together with an image of its prompt: a reference, or the source of an edit."""

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
    """The probability that a judge says yes, the generated image is better than the prompt's first image, its reference
    (RewardDance, Wu et al. 2025, arXiv:2509.08826). The other options are those of `vlm_judge`."""

    def __init__(self, *, question: str = IS_IT_BETTER, normalise: bool = False, **judge: Any) -> None:
        super().__init__(question=question, normalise=normalise, **judge)

    def _build_question(self, sample: Sample) -> JudgeQuestion:
        return self._question(sample, as_pil(image_of(sample)), prompt_image(sample, "the reference of the judge"))


class EditJudge(VlmJudge):
    """P(yes) / (P(yes) + P(no)), 0 to 1, of a judge that sees the prompt's first image, the source, and then the edited
    image. It is asked whether the instruction was followed and the rest left unchanged.

    To score the edit and the rest apart, use two of these, each with a `question` of its own. The other options are
    those of `vlm_judge`.
    """

    def __init__(self, *, question: str = IS_IT_EDITED, **judge: Any) -> None:
        super().__init__(question=question, **judge)

    def _build_question(self, sample: Sample) -> JudgeQuestion:
        return self._question(sample, prompt_image(sample, "the image that was edited"), as_pil(image_of(sample)))


def prompt_image(sample: Sample, role: str) -> Image.Image:
    """Returns the prompt's first image. Raises UserError if there is none. role: the purpose of the image, for the
    message."""
    if not sample.prompt.images:
        raise UserError(f"prompt {sample.prompt.id!r} has no image; add {role} to its row")
    return sample.prompt.images[0]

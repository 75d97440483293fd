"""Teacher models for distillation into a vision-language model: checks that they fit the student, and converts text and
rollouts to token ids for them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import AutoProcessor

from mmrl.errors import UserError
from mmrl.policies.resizing import resize_options
from mmrl.policies.tokenizers import Processor
from mmrl.policies.vlm.responses.tokens import ChatTokenizer
from mmrl.policies.vlm.scorer import TokenScorer, transformers_model
from mmrl.protocols.parts import Policy
from mmrl.protocols.teachers import TokenTeachers
from mmrl.rollouts import Rollouts


class VisionLanguageTeachers(TokenTeachers):
    """Teachers that get the same token ids and pixel values as the student, so they must share its processor."""

    def __init__(self, student: nn.Module, tokens: ChatTokenizer) -> None:
        super().__init__(student)
        self.tokens = tokens

    def check(self, path: str, guidance: float | None) -> None:
        """Raises UserError unless the teacher at `path` has the vocabulary and image patches of the student."""
        try:
            processor = AutoProcessor.from_pretrained(path)
        except (OSError, ValueError) as error:
            raise UserError(f"teacher {path} cannot be read: {str(error).splitlines()[0]}") from None
        check_vocabulary(path, processor, self.tokens.processor)
        check_images(path, processor, self.tokens.processor)

    def _load(self, path: str, guidance: float | None) -> Policy:
        """Loads a teacher, restricted to the tokens that the student may sample."""
        teacher = super()._load(path, guidance)
        suppress(teacher.module, self.tokens)
        return teacher

    def vocabulary(self) -> Tensor:
        """Returns the ids of all tokens that the student may sample, ascending, [token] int64."""
        sampled = set(range(len(self.tokens.tokenizer))) - set(self.tokens.suppressed)
        return torch.tensor(sorted(sampled))

    def ids(self, rollouts: Rollouts) -> list[tuple[list[int], list[int]]]:
        """Returns the token ids of prompt and response of each rollout, for a teacher behind a server. Raises UserError
        if a rollout has images."""
        for sample, row in zip(rollouts.samples, rollouts.inputs, strict=True):
            if row.images or row.observed_images:
                raise UserError(
                    f"prompt {sample.prompt.id} has images, but a teacher of type=server gets token ids only; use a "
                    "teacher of type=path, or prompts without images"
                )
        return [(row.prompt.tolist(), row.response.tolist()) for row in rollouts.inputs]

    def tokenize(self, text: str) -> list[int]:
        """Returns the token ids of a text."""
        return self.tokens.ids(text)


def check_vocabulary(path: str, teacher: Processor, student: Processor) -> None:
    """Raises UserError, which names one differing token, if the tokenizers have different vocabularies."""
    teacher_ids, student_ids = teacher.tokenizer.get_vocab(), student.tokenizer.get_vocab()
    if teacher_ids == student_ids:
        return
    all_tokens = {*student_ids, *teacher_ids}
    token = min(token for token in all_tokens if student_ids.get(token) != teacher_ids.get(token))
    teacher_id, student_id = teacher_ids.get(token, "absent"), student_ids.get(token, "absent")
    raise UserError(
        f"teacher {path} has another vocabulary than the model: {len(teacher_ids)} and {len(student_ids)} tokens; the "
        f"id of {token!r} is {teacher_id} there and {student_id} in the model; take a teacher of the model's own family"
    )


def check_images(path: str, teacher: Processor, student: Processor) -> None:
    """Raises UserError if one image token covers a different number of pixels in the teacher than in the student."""
    teacher_side, student_side = (
        None if size is None else size["factor"] for size in map(resize_options, (teacher, student))
    )
    if teacher_side != student_side:
        raise UserError(
            f"an image token of teacher {path} covers {teacher_side} x {teacher_side} pixels, one of the model "
            f"{student_side} x {student_side}; take a teacher of the model's own family"
        )


def suppress(module: nn.Module, tokens: ChatTokenizer) -> None:
    """Gives probability 0 in the teacher to all tokens that the student may not sample, and to rows of the teacher's
    output matrix beyond the tokenizer's last id.

    module: the teacher's `TokenScorer`. tokens: the student's tokenizer.
    """
    assert isinstance(module, TokenScorer)
    rows = transformers_model(module.model).get_output_embeddings().weight.shape[0]
    unused_rows = set(range(len(tokens.tokenizer), rows))
    suppressed = sorted({number for number in tokens.suppressed if number < rows} | unused_rows)
    module.sampling = replace(module.sampling, suppressed=tuple(suppressed))
    module.suppressed = torch.tensor(suppressed, dtype=torch.int64, device=module.suppressed.device)

"""Teachers of vision-language models: what they have to share with the student, and its tokens as they read them."""

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
    """Teachers that read the very tokens and pixels of the student."""

    def __init__(self, student: nn.Module, tokens: ChatTokenizer) -> None:
        super().__init__(student)
        self.tokens = tokens

    def check(self, path: str) -> None:
        try:
            processor = AutoProcessor.from_pretrained(path)
        except (OSError, ValueError) as error:
            raise UserError(f"teacher {path} can not be read: {str(error).splitlines()[0]}") from None
        check_vocabulary(path, processor, self.tokens.processor)
        check_images(path, processor, self.tokens.processor)

    def _load(self, path: str, guidance: float | None) -> Policy:
        teacher = super()._load(path, guidance)
        suppress(teacher.module, self.tokens)
        return teacher

    def vocabulary(self) -> Tensor:
        sampled = set(range(len(self.tokens.tokenizer))) - set(self.tokens.suppressed)
        return torch.tensor(sorted(sampled))

    def ids(self, rollouts: Rollouts) -> list[tuple[list[int], list[int]]]:
        for sample, row in zip(rollouts.samples, rollouts.inputs, strict=True):
            if row.images or row.read_images:
                raise UserError(
                    f"prompt {sample.prompt.id} has images, and a teacher behind a server reads token ids alone; give "
                    "teacher.path, or prompts of text"
                )
        return [(row.prompt.tolist(), row.response.tolist()) for row in rollouts.inputs]

    def spelled(self, text: str) -> list[int]:
        return self.tokens.ids(text)


def check_vocabulary(path: str, teacher: Processor, student: Processor) -> None:
    """Raises UserError where the vocabularies differ, naming a token that does."""
    theirs, ours = teacher.tokenizer.get_vocab(), student.tokenizer.get_vocab()
    if theirs == ours:
        return
    token = min(token for token in {*ours, *theirs} if ours.get(token) != theirs.get(token))
    raise UserError(
        f"teacher {path} has another vocabulary than the model: {len(theirs)} and {len(ours)} tokens, of which "
        f"{token!r} is number {theirs.get(token)} and {ours.get(token)}; take a teacher of the model's own family"
    )


def check_images(path: str, teacher: Processor, student: Processor) -> None:
    """Raises UserError where an image token of the teacher's stands for another square of pixels than the student's."""
    theirs, ours = (None if size is None else size["factor"] for size in map(resize_options, (teacher, student)))
    if theirs != ours:
        raise UserError(
            f"teacher {path} reads images in squares of {theirs} pixels, the model of {ours}; take a teacher of the "
            "model's own family"
        )


def suppress(module: nn.Module, tokens: ChatTokenizer) -> None:
    """Lets a teacher choose among the tokens that the student may sample; its output matrix may have more rows."""
    assert isinstance(module, TokenScorer)
    rows = transformers_model(module.model).get_output_embeddings().weight.shape[0]
    never = {number for number in tokens.suppressed if number < rows} | set(range(len(tokens.tokenizer), rows))
    module.sampling = replace(module.sampling, suppressed=tuple(sorted(never)))
    module.suppressed = torch.tensor(sorted(never), dtype=torch.int64, device=module.suppressed.device)

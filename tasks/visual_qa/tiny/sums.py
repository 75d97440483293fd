"""A tiny vision-language model that adds digits line by line, and the values of its steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mmrl.rollouts import Sample
from mmrl.tasks.visual_qa.data.digits import CELL
from mmrl.tasks.visual_qa.data.running_sums import QUESTION

VOCABULARY = 320


def build(path: str | Path, seed: int = 0) -> None:
    """Writes model, processor and generation config to a folder that transformers' Auto classes load offline."""
    from mmrl.policies.vlm.tiny_qwen import Sizes, train_tokenizer, write

    corpus = [QUESTION, *(f"{role}\n" for role in ("system", "user", "assistant"))] * 10
    write(path, train_tokenizer(corpus, VOCABULARY), Sizes(patch=CELL), seed)


def right_steps(sample: Sample, steps: Sequence[str]) -> list[float]:
    """Returns 1 for each line that adds the next digit to the line before it, else 0. A line after a wrong one may be
    right. Lines beyond the digits are wrong."""
    values, before = [], 0
    digits: list[int] = sample.prompt.metadata["digits"]
    for line, step in enumerate(steps):
        text = step.strip()
        is_number = text.isascii() and text.isdigit()
        right = line < len(digits) and is_number and int(text[:9]) == before + digits[line]
        values.append(float(right))
        before = int(text[:9]) if is_number else -1
    return values

"""A tiny vision-language model that adds digits line by line, and the values of its steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mmrl.rollouts import Sample
from mmrl.tasks.visual_qa.data.digits import CELL
from mmrl.tasks.visual_qa.data.running_sums import QUESTION

VOCABULARY = 320
MOST_DIGITS = 9


def build(path: str | Path, seed: int = 0) -> None:
    """Writes model, processor and generation config to a folder that transformers' Auto classes load offline."""
    from mmrl.policies.vlm.tiny_qwen import Sizes, train_tokenizer, write

    corpus = [QUESTION, *(f"{role}\n" for role in ("system", "user", "assistant"))] * 10
    write(path, train_tokenizer(corpus, VOCABULARY), Sizes(patch=CELL), seed)


def right_steps(sample: Sample, steps: Sequence[str]) -> list[float]:
    """Returns 1 for each line that adds the next digit to the line before it, else 0. A line after a wrong one may be
    right. Lines beyond the digits are wrong."""
    digits: list[int] = sample.prompt.metadata["digits"]
    sums = [read_sum(step.strip()) for step in steps]
    values = [0.0] * len(sums)
    for line, (before, after) in enumerate(zip([0, *sums], sums, strict=False)):
        if line < len(digits) and before is not None and after == before + digits[line]:
            values[line] = 1.0
    return values


def read_sum(line: str) -> int | None:
    """Returns the number in a line; None if it holds something else, or more digits than any sum has."""
    return int(line) if line.isascii() and line.isdigit() and len(line) <= MOST_DIGITS else None

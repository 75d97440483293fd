"""Prompts whose chat template opens the thoughts of the response."""

from __future__ import annotations

from torch import Tensor

from mmrl.policies.tokenizers import Tokenizer
from mmrl.rewards.parsing.responses import THOUGHTS

TAIL = 12  # tokens that hold the opening tag of thoughts and the white space behind it


def opens_thoughts(tokenizer: Tokenizer, ids: Tensor) -> bool:
    """Returns whether the tokens before a response end in <think> or its kin."""
    text = tokenizer.decode(ids[-TAIL:]).rstrip()
    return text.endswith(tuple(opening for opening, _ in THOUGHTS))

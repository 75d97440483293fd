"""Detects prompts whose chat template opens the reasoning of the response, with <think> or a similar tag."""

from __future__ import annotations

from torch import Tensor

from mmrl.policies.tokenizers import Tokenizer
from mmrl.rewards.parsing.responses import THOUGHTS

TAIL = 12  # number of a prompt's last tokens that are decoded: enough for the opening tag and the white space after it


def opens_thoughts(tokenizer: Tokenizer, ids: Tensor) -> bool:
    """Returns whether a prompt, token ids [token], ends in <think> or another opening tag of reasoning."""
    text = tokenizer.decode(ids[-TAIL:]).rstrip()
    return text.endswith(tuple(opening for opening, _ in THOUGHTS))

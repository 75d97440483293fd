"""What the reasoning names of what a report says."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from mmrl.rewards.types import Reward
from mmrl.rollouts import Sample

REASONING = re.compile(r"<think>(.*?)(?:</think>|$)", re.DOTALL)


def findings_named(*, findings: str = "findings", absent: str | None = None, everywhere: bool = False) -> Reward:
    """The share of the prompt's findings that the reasoning, in <think>, names: named / (all + invented). It pays for
    the way to an answer where a report tells what there is to see (the process reward of ChestX-Reasoner, arXiv
    2504.20930, and the cue recall of OPPO; reconstructed from summaries).

    findings: key of the prompts' metadata with a list of phrases, each a text or a list of texts of which one will do.
    absent: key with phrases of what is not there; each that is named counts as invented. everywhere: in the whole
    response. Capitals and spaces do not count, a phrase is found as whole words; None where a prompt has no findings.
    """

    def reward(sample: Sample) -> float | None:
        wanted = sample.prompt.metadata.get(findings)
        if not wanted:
            return None
        thoughts = [sample.response] if everywhere else REASONING.findall(sample.response)
        text = plain(" ".join(thoughts))
        named = sum(says(text, phrase) for phrase in wanted)
        unwanted = sample.prompt.metadata.get(absent) or () if absent is not None else ()
        return named / (len(wanted) + sum(says(text, phrase) for phrase in unwanted))

    return reward


def says(text: str, phrase: Any) -> bool:
    """Whether a plain text holds a phrase, or one of several, as whole words."""
    ways: Sequence[Any] = phrase if isinstance(phrase, list | tuple) else (phrase,)
    return any(re.search(rf"(?<!\w){re.escape(plain(str(way)))}(?!\w)", text) for way in ways)


def plain(text: str) -> str:
    return " ".join(text.lower().split())

"""A reward for the findings of a report that the reasoning names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from mmrl.rewards.parsing.negation import is_affirmed
from mmrl.rewards.parsing.responses import full_response, split_thoughts
from mmrl.rewards.parsing.typography import normalize_text
from mmrl.rewards.types import Reward
from mmrl.rollouts import Sample

# Scripts without spaces between words, in which no phrase ends where a word does.
_UNSPACED = "\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3"


def findings_named(*, findings: str = "findings", absent: str | None = None, everywhere: bool = False) -> Reward:
    """The share of the prompt's findings that the reasoning, up to </think>, names: named / (all + invented). It pays
    for the way to an answer where a report tells what there is to see (the process reward of ChestX-Reasoner, arXiv
    2504.20930, and the cue recall of OPPO; reconstructed from summaries).

    findings: key of the prompts' metadata with a list of phrases, each a string or a list of strings of which one will
    do. absent: key with phrases of absent findings; each that is named counts as invented. everywhere: in the whole
    response. Capitals, spaces and typography do not count, a phrase is found as whole words where its script has them,
    and not where English words deny it: "no edema" does not count. None where a prompt has no findings.
    """

    def reward(sample: Sample) -> float | None:
        wanted = sample.prompt.metadata.get(findings)
        if not wanted:
            return None
        text = normalize_text(sample.response if everywhere else split_thoughts(full_response(sample))[0])
        named = sum(says(text, phrase) for phrase in wanted)
        unwanted = sample.prompt.metadata.get(absent) or () if absent is not None else ()
        return named / (len(wanted) + sum(says(text, phrase) for phrase in unwanted))

    return reward


def says(text: str, phrase: object) -> bool:
    """Returns whether a plain text affirms a phrase, or one of several, as whole words."""
    ways: Sequence[Any] = phrase if isinstance(phrase, list | tuple) else (phrase,)
    return any(is_affirmed(text, _whole_words(normalize_text(str(way)))) for way in ways)


@lru_cache(maxsize=4096)
def _whole_words(phrase: str) -> re.Pattern[str]:
    begin = rf"(?<![^\W{_UNSPACED}])" if re.match(rf"[^\W{_UNSPACED}]", phrase) else ""
    end = rf"(?![^\W{_UNSPACED}])" if re.search(rf"[^\W{_UNSPACED}]\Z", phrase) else ""
    return re.compile(f"{begin}{re.escape(phrase)}{end}")

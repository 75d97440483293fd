"""A reward for the findings of a medical report that the reasoning names."""

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

# Scripts without spaces between words: phrases in them have no word boundaries.
_UNSPACED = "\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3"


def findings_named(*, findings: str = "findings", absent: str | None = None, everywhere: bool = False) -> Reward:
    """Builds a reward: the share of the prompt's findings that the reasoning, up to </think>, names: named / (all +
    invented).

    It rewards reasoning that names the findings of the report. It is the process reward of ChestX-Reasoner (arXiv
    2504.20930) and the cue recall of OPPO, reconstructed from summaries.

    findings: key of the prompts' metadata with a list of phrases; each is a string, or a list of strings of which any
    counts. absent: key with phrases of absent findings; each that is named counts as invented. everywhere: search the
    full response. Case, spaces and typography are ignored. A phrase has to occur as full words, and not where English
    words deny it: "no edema" does not count. None if a prompt has no findings.
    """

    def reward(sample: Sample) -> float | None:
        """Returns named / (all + invented) findings; None if the prompt has no findings."""
        present_findings = sample.prompt.metadata.get(findings)
        if not present_findings:
            return None
        text = normalize_text(sample.response if everywhere else split_thoughts(full_response(sample))[0])
        named = sum(affirms(text, phrase) for phrase in present_findings)
        # none without the option `absent`, or if the prompt does not have that key
        absent_findings = sample.prompt.metadata.get(absent) or () if absent is not None else ()
        invented = sum(affirms(text, phrase) for phrase in absent_findings)
        return named / (len(present_findings) + invented)

    return reward


def affirms(text: str, phrase: object) -> bool:
    """Returns whether a normalized text affirms a phrase, or any of a list of phrases, as full words."""
    phrases: Sequence[Any] = phrase if isinstance(phrase, list | tuple) else (phrase,)
    return any(is_affirmed(text, _full_words(normalize_text(str(variant)))) for variant in phrases)


@lru_cache(maxsize=4096)
def _full_words(phrase: str) -> re.Pattern[str]:
    """Returns a pattern that matches a phrase as full words. In scripts without spaces any neighbour is allowed."""
    begin = rf"(?<![^\W{_UNSPACED}])" if re.match(rf"[^\W{_UNSPACED}]", phrase) else ""
    end = rf"(?![^\W{_UNSPACED}])" if re.search(rf"[^\W{_UNSPACED}]\Z", phrase) else ""
    return re.compile(f"{begin}{re.escape(phrase)}{end}")

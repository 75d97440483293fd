"""Mentions of phrases in plain English text, and whether they are denied."""

from __future__ import annotations

import re

_PERHAPS = re.compile(  # they read as denials, and deny nothing
    r"\b(?:can ?not|can't|could not|couldn't|not|never) (?:be )?(?:rul(?:e|ed) out|exclud(?:e|ed))\b"
    r"|\bnot only\b|\bno doubt\b|\bno (?:\w+ )?(?:change|increase|decrease) (?:in|of)\b|\bwithout (?:\w+ )?doubt\b"
)
_DENIED_BEFORE = re.compile(
    r"\b(?:no|not|cannot|never|neither|nor|none|without|absent|absence of|free (?:of|from)|negative for"
    r"|lack(?:s|ing)?|den(?:y|ies|ied)|rul(?:e|es|ed|ing) out|exclud(?:e|es|ed|ing)|\w+n't)\b"
)
_SEEN = r"(?:seen|present|identified|visible|visuali[sz]ed|observed|detected|found|evident|appreciated|noted|there)"
_DENIED_BEHIND = re.compile(
    rf"(?: \w+){{0,3}}? (?:absent|excluded|ruled out|(?:not|never|\w+n't) (?:\w+ )?{_SEEN})\b"
    r"| ?[:=(-] ?(?:no|none|not|absent|negative)\b"
)
# Where what is denied ends: a sentence, a turn of thought, or another statement behind a comma.
_ENDS = re.compile(
    r"[.;:!?](?= |\Z)|\b(?:but|however|although|though|yet|except|instead|whereas|while)\b"
    rf"|\b(?:{_SEEN}|none|absent|excluded|ruled out),|, (?:and )?(?:an?|the|there|this|these|it|i|we)\b"
)


def affirmed(text: str, phrase: re.Pattern[str]) -> bool:
    """Returns whether a plain lower-case text of one line holds the phrase in a place where it is not denied: neither
    by words before it in its clause (no, without, free of, ruled out), nor behind it (is absent, was not seen)."""
    text = _PERHAPS.sub("perhaps", text)
    return any(not _denied(text[: match.start()], text[match.end() :]) for match in phrase.finditer(text))


def _denied(before: str, behind: str) -> bool:
    begin = max((match.end() for match in _ENDS.finditer(before)), default=0)
    return bool(_DENIED_BEFORE.search(before, begin) or _DENIED_BEHIND.match(behind))

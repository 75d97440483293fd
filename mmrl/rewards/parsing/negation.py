"""Detection of phrases that are asserted or denied in plain English text."""

from __future__ import annotations

import re

_PERHAPS = re.compile(  # phrases that contain a negation, but deny nothing
    r"\b(?:can ?not|can't|could not|couldn't|not|never) (?:be )?(?:rul(?:e|ed) out|exclud(?:e|ed))\b"
    r"|\bnot only\b|\bno doubt\b|\bno (?:\w+ )?(?:change|increase|decrease) (?:in|of)\b|\bwithout (?:\w+ )?doubt\b"
)
_DENIED_BEFORE = re.compile(
    r"\b(?:no|not|cannot|never|neither|nor|none|without|absent|absence of|free (?:of|from)|negative for"
    r"|lack(?:s|ing)?|den(?:y|ies|ied)|rul(?:e|es|ed|ing) out|exclud(?:e|es|ed|ing)|\w+n't)\b"
)
_SEEN = r"(?:seen|present|identified|visible|visuali[sz]ed|observed|detected|found|evident|appreciated|noted|there)"
_DENIED_AFTER = re.compile(
    rf"(?: \w+){{0,3}}? (?:absent|excluded|ruled out|(?:not|never|\w+n't) (?:\w+ )?{_SEEN})\b"
    r"| ?[:=(-] ?(?:no|none|not|absent|negative)\b"
)
# Where a denial ends: at a sentence, at a word such as "but", or at another statement after a comma.
_ENDS = re.compile(
    r"[.;:!?](?= |\Z)|\b(?:but|however|although|though|yet|except|instead|whereas|while)\b"
    rf"|\b(?:{_SEEN}|none|absent|excluded|ruled out),|, (?:and )?(?:an?|the|there|this|these|it|i|we)\b"
)


def is_affirmed(text: str, phrase: re.Pattern[str]) -> bool:
    """Returns whether a text mentions a phrase at least once without denying it.

    Denied means: by words before it in its clause (no, without, free of, ruled out), or by words after it (is absent,
    was not seen). text: lower case, in one line.
    """
    text = _PERHAPS.sub("perhaps", text)
    return any(not _is_denied(text[: match.start()], text[match.end() :]) for match in phrase.finditer(text))


def _is_denied(before: str, after: str) -> bool:
    """Returns whether the text before or after a phrase denies it."""
    begin = max((match.end() for match in _ENDS.finditer(before)), default=0)
    return bool(_DENIED_BEFORE.search(before, begin) or _DENIED_AFTER.match(after))

"""Texts in quotation marks, those of many languages."""

from __future__ import annotations

import re

_PAIRS = (
    '"([^"]++)"',
    "\u201c([^\u201c\u201d]++)\u201d",
    '\u201e([^\u201e\u201c\u201d"]++)[\u201c\u201d"]',
    "\u201d([^\u201d]++)\u201d",
    "\xab([^\xab\xbb]++)\xbb",
    "\xbb([^\xab\xbb]++)\xab",
    "\u300c([^\u300c\u300d]++)\u300d",
    "\u300e([^\u300e\u300f]++)\u300f",
    "\u301d([^\u301d-\u301f]++)[\u301e\u301f]",
    "\u201a([^\u201a\u2018]++)\u2018",
    # An apostrophe is not a quotation mark: those open before a word, close after one, and do not span lines.
    r"(?<!\w)\u2018((?:[^\u2018\u2019\n]|\u2019(?=\w)){1,400}+)\u2019(?!\w)",
    r"(?<!\w)'((?:[^'\n]|'(?=\w)){1,400}+)'(?!\w)",
)
_QUOTED = re.compile("|".join(_PAIRS))


def quoted_texts(text: str) -> list[str]:
    """Returns every quoted text, in order, without spaces at its ends."""
    text = text.replace("\uff02", '"')
    contents = ("".join(group for group in match.groups() if group) for match in _QUOTED.finditer(text))
    return [stripped for content in contents if (stripped := content.strip())]

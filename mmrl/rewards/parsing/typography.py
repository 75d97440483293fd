"""Normalises the typography of texts in all scripts, so that equal answers are equal strings."""

from __future__ import annotations

import re
import unicodedata

_SUPERSCRIPTS = "\u2070\xb9\xb2\xb3\u2074\u2075\u2076\u2077\u2078\u2079\u207a\u207b\u207c\u207d\u207e\u207f\u2071"
_PLAIN_SUPERSCRIPTS = str.maketrans(_SUPERSCRIPTS, "0123456789+-=()ni")
_POWER = re.compile(f"[{_SUPERSCRIPTS}]++")
_FRACTION = re.compile("(\\d?)([\xbc-\xbe\u2150-\u215f\u2189])")
_IN_THOUSANDS = re.compile("(?<=\\d)[\xa0\u2007-\u200a\u202f](?=\\d{3}(?!\\d))")
_MARKS = {
    "'": "\u2018\u2019\u201a\u201b\u02bc\u02bb\u2032\u2039\u203a\u275b\u275c\xb4",
    '"': "\u201c\u201d\u201e\u201f\xab\xbb\u2033\u275d\u275e\u300c\u300d\u300e\u300f\u301d\u301e\u301f",
    "-": "\u2010\u2011\u2012\u2013\u2014\u2015\u2212",
    ".": "\u3002\u0964\u06d4\u066b",
    ",": "\u3001\u060c\u066c",
    ";": "\u061b",
    "?": "\u061f",
    "%": "\u066a",
    "/": "\u2044\u2215\xf7",
    ":": "\u2236",
    "*": "\xd7\u2217\u22c5\u2062",
    "<=": "\u2264",
    ">=": "\u2265",
    "!=": "\u2260",
    "[": "\u3010\u3014",
    "]": "\u3011\u3015",
}
_TABLE = {ord(mark): ascii_mark for ascii_mark, marks in _MARKS.items() for mark in marks}
_MAX_COMBINING = 32  # marks on one letter; NFKC takes the square of their number
_STACKED = re.compile(f"([\u0300-\u036f]{{{_MAX_COMBINING}}})[\u0300-\u036f]++")


def normalize_typography(text: str, power: str = "^{}", fraction: str = "{}/{}") -> str:
    """Converts a string to ASCII typography as far as possible.

    That means: compatibility forms (NFKC), digits of all scripts, quotes, dashes and minus signs, full stops and
    commas; invisible characters are removed. Fractions such as \xbd become 1/2 (2\xbd: 2 1/2), superscripts ^2,
    subscripts digits. Thin and non-breaking spaces between thousands are removed. Case and other spaces stay. power,
    fraction: format strings of superscripts and fractions.
    """
    if text.isascii():
        return text
    text = _IN_THOUSANDS.sub("", text)
    text = _POWER.sub(lambda run: power.format(run[0].translate(_PLAIN_SUPERSCRIPTS)), text)
    text = _FRACTION.sub(lambda match: _format_fraction(match[1], match[2], fraction), text)
    # a letter loses the marks beyond _MAX_COMBINING, since NFKC takes the square of their number
    text = _STACKED.sub(r"\1", text.translate(_TABLE))
    return unicodedata.normalize("NFKC", text).translate(_CHARACTERS)


def normalize_case(text: str) -> str:
    """Returns `normalize_typography` of a string, case-folded."""
    text = normalize_typography(text).casefold()
    return text if text.isascii() else unicodedata.normalize("NFKC", text)


def normalize_text(text: str) -> str:
    """Returns `normalize_case` of a string, with single spaces and none at the ends."""
    return " ".join(normalize_case(text).split())


def _format_fraction(digit: str, character: str, template: str) -> str:
    """Formats a fraction character after an optional whole digit: 2 and the character for one half become 2 1/2.
    template: a format string of numerator and denominator, such as {}/{}."""
    # NFKC of \xbd is 1, a fraction slash and 2; the character \u215f (1/) has no denominator
    numerator, _, denominator = unicodedata.normalize("NFKC", character).partition("\u2044")
    space = " " if digit and "/" in template else ""  # 2 1/2, but no space before LaTeX's \frac
    return f"{digit}{space}{template.format(numerator, denominator)}" if denominator else f"{digit}{numerator}/"


class Characters(dict[int, str]):
    """Replacements of the characters that NFKC leaves unchanged, by code point; each is computed at its first use."""

    def __missing__(self, code: int) -> str:
        self[code] = replacement = _replacement(code)
        return replacement


def _replacement(code: int) -> str:
    """Returns the ASCII form of a Unicode code point: "" for an invisible one, the character itself if it has none."""
    character = chr(code)
    if code < 128:
        return character
    if code in _TABLE:
        return _TABLE[code]
    if (digit := unicodedata.decimal(character, None)) is not None:
        return str(digit)
    invisible = unicodedata.category(character) == "Cf" or 0xFE00 <= code <= 0xFE0F  # variation selectors
    return "" if invisible else character


_CHARACTERS = Characters()

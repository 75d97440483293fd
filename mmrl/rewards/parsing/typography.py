"""One typography for texts of all scripts, so that the same answer is the same text."""

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
_COMBINING_AT_ONCE = 32  # marks on a letter; to sort more of them takes the square of their number
_STACKED = re.compile(f"([\u0300-\u036f]{{{_COMBINING_AT_ONCE}}})[\u0300-\u036f]++")


def plain(text: str, power: str = "^{}", fraction: str = "{}/{}") -> str:
    """A string in the typography of ASCII as far as that has it: compatibility forms (NFKC), digits of all scripts,
    quotes, dashes and minus signs, full stops and commas of other scripts; without invisible characters.

    Fractions such as \xbd become 1/2 (2\xbd: 2 1/2), powers ^2, subscripts digits. Thin and unbreakable spaces between
    thousands are left out. Case and other spaces stay. power, fraction: formats of theirs.
    """
    if text.isascii():
        return text
    text = _IN_THOUSANDS.sub("", text)
    text = _POWER.sub(lambda run: power.format(run[0].translate(_PLAIN_SUPERSCRIPTS)), text)
    text = _FRACTION.sub(lambda match: _written_out(match[1], match[2], fraction), text)
    text = _STACKED.sub(r"\1", text.translate(_TABLE))
    return unicodedata.normalize("NFKC", text).translate(_CHARACTERS)


def folded(text: str) -> str:
    """`plain`, without differences of case."""
    text = plain(text).casefold()
    return text if text.isascii() else unicodedata.normalize("NFKC", text)


def spaced(text: str) -> str:
    """`folded`, with single spaces and none at the ends."""
    return " ".join(folded(text).split())


def _written_out(digit: str, character: str, fraction: str) -> str:
    numerator, _, denominator = unicodedata.normalize("NFKC", character).partition("\u2044")
    apart = " " if digit and "/" in fraction else ""
    return f"{digit}{apart}{fraction.format(numerator, denominator)}" if denominator else f"{digit}{numerator}/"


class Characters(dict[int, str]):
    """Characters that NFKC leaves as they are, by code point, each worked out once."""

    def __missing__(self, code: int) -> str:
        self[code] = replacement = _replacement(code)
        return replacement


def _replacement(code: int) -> str:
    """Returns the ASCII form of a Unicode code point; "" for invisible ones, itself where there is none."""
    character = chr(code)
    if code < 128:
        return character
    if code in _TABLE:
        return _TABLE[code]
    if (digit := unicodedata.decimal(character, None)) is not None:
        return str(digit)
    unseen = unicodedata.category(character) == "Cf" or 0xFE00 <= code <= 0xFE0F
    return "" if unseen else character


_CHARACTERS = Characters()

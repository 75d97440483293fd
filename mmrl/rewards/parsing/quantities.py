"""Exact numbers as people write them, with sign, scale word and unit."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from mmrl.rewards.parsing.typography import normalize_typography
from mmrl.rewards.parsing.units import CURRENCIES, Unit, unit_at

MAX_DIGITS = 400  # digits of a number, and the largest power of ten; longer ones are not read as numbers
NUMBER = (  # groups of digits are bounded, so that the time does not grow with the square of their number
    r"(?:(?:\d{1,3}+(?:,\d{3}){1,134}+(?!\d)|\d{1,3}+(?: \d{3}){1,134}+(?![\d/])|\d{1,3}+(?:'\d{3}){1,134}+(?!\d)"
    r"|\d{1,2}+(?:,\d\d(?=,)){1,9}+,\d{3}(?!\d)|\d++)(?:\.\d++)?+|(?<!\.)\.\d++)"
)
_SEPARATORS = re.compile("[,' ]")
_SIGNED = r"[-+]?\d++"
_QUANTITY = re.compile(
    # Groups: whole, numerator and denominator of 1 1/2; of 1/2; number, exponent, power of ten, power.
    # Digits right after a letter are part of a name (H2O); after a point, colon or slash, of a version, time or date.
    rf"(?<![A-Za-z0-9_^])(?<!\d[.:/])"
    rf"(?:(\d++)[ ]++(\d++)/(\d++)(?![/\d])"
    rf"|(\d++)\s*+/\s*+(\d++)(?!\s*+/\s*+\d)"
    rf"|({NUMBER})(?![.:]\d|\s*+/\s*+\d)"
    rf"(?:[eE]({_SIGNED})(?!\w)|\s*+[*xX]\s*+10\s*+(?:\^|\*\*)\s*+[{{(]?({_SIGNED})[}})]?"
    rf"|\s*+(?:\^|\*\*)\s*+[{{(]?({_SIGNED})[}})]?)?+)"
)
_SCALES = {
    "hundred": 2,
    "thousand": 3,
    "million": 6,
    "billion": 9,
    "trillion": 12,
    "lakh": 5,
    "crore": 7,
    "\u5343": 3,
    "\u4e07": 4,
    "\u842c": 4,
    "\u4ebf": 8,
    "\u5104": 8,
}
_SCALE = re.compile(rf"[ -]?({'|'.join(_SCALES)})s?(?![A-Za-z])", re.IGNORECASE)
_LATEX = (
    (re.compile(r"\\[dt]?frac\s*+\{\s*+([-+]?[\d.]++)\s*+\}\s*+\{\s*+([\d.]++)\s*+\}"), r" \1/\2"),
    (re.compile(r"\\[dt]?frac(\d)(\d)"), r" \1/\2"),
    (re.compile(r"\\(?:times|cdot)(?![A-Za-z])"), "*"),
    (re.compile(r"\\([%$])"), r"\1"),
    (re.compile(r"\\[,;!:]|\{,\}(?=\d)"), ""),
    (re.compile(r"\\(?:text|mathrm|mathbf|textbf|mbox)\s*+\{([^{}]*+)\}"), r" \1 "),
    (re.compile(r"\^\s*+\{?\\circ\}?"), "\xb0"),
)
# After one of these characters a minus is a sign, not a subtraction.
_BEFORE_MINUS = "=:(,[<>~\u2248|"


@dataclass(frozen=True)
class Quantity:
    """A number, and the unit after it; None if it has no known unit."""

    value: Fraction
    unit: Unit | None = None

    def is_near(self, other: Quantity, rtol: float | None, atol: float | None) -> bool:
        """Returns whether this quantity differs from `other` by at most atol + rtol |other|; a tolerance of None is 0.

        If both tolerances are None, whole numbers have to be equal, and other numbers within a millionth of `other`.
        Two known units are converted; they have to measure the same dimension.
        """
        value, target = self.value, other.value
        if self.unit is not None and other.unit is not None:
            if self.unit.dimension != other.unit.dimension:
                return False
            value = value * self.unit.scale / other.unit.scale
        if rtol is None and atol is None:
            are_whole = value.denominator == target.denominator == 1
            return value == target if are_whole else abs(value - target) <= abs(target) / 10**6
        return abs(value - target) <= _exact(atol) + _exact(rtol) * abs(target)


def last_quantity(text: str) -> Quantity | None:
    """Returns the last number of a string with its unit; None if it has none."""
    text = _strip_latex(normalize_typography(text))
    last = None
    for match in _QUANTITY.finditer(text):
        last = match
    if last is None:
        return None
    value = _value(last)
    if value is None:
        return None
    start, end = last.span()
    if end < len(text) and (scale := _SCALE.match(text, end)):
        value, end = value * 10 ** _SCALES[scale[1].lower()], scale.end()
    unit = unit_at(text, end) if end < len(text) else None
    if start:
        value = -value if _is_negative(text, start) else value
        unit = unit or _currency_before(text, start)
    return Quantity(value, unit)


def _currency_before(text: str, start: int) -> Unit | None:
    """Returns the currency whose sign stands right before index `start`, as in $5; None without one."""
    currency = text[max(0, start - 4) : start].rstrip("+- ")[-1:]
    return unit_at(currency, 0) if currency and currency in CURRENCIES else None


def _strip_latex(text: str) -> str:
    """Rewrites LaTeX fractions, products, percent signs and units as plain text."""
    if "\\" not in text and "{" not in text:
        return text
    for pattern, replacement in _LATEX:
        text = pattern.sub(replacement, text)
    return text


def _is_negative(text: str, start: int) -> bool:
    """Returns whether the text before the number at `start` makes it negative. A hyphen after a letter and a minus
    after a number do not: covid-19, 5-3."""
    if text[start - 1].isalpha():
        return False
    before = text[max(0, start - 24) : start]  # only a few characters, so that the time grows linearly
    trimmed = before.rstrip(" " + CURRENCIES)
    if trimmed[-1:] == "-":
        before_sign = trimmed[:-1]
        last_character = before_sign.rstrip(" \n\t" + CURRENCIES)[-1:]
        if not last_character or last_character in _BEFORE_MINUS:
            return True
        # elsewhere a sign touches its number, and nothing that could be its left side: not in 5 - 3, 5-3 or a-3
        return before[-1] != " " and last_character not in "0123456789)%}]" and not before_sign[-1:].isalnum()
    return before[-1] == " " and trimmed.lower().endswith(("minus", "negative"))


def _value(match: re.Match[str]) -> Fraction | None:
    """Converts a match of _QUANTITY to a fraction: a mixed number, a ratio, a decimal, with an exponent or a power.
    Returns None for a division by 0 and beyond MAX_DIGITS digits."""
    whole, mixed_numerator, mixed_denominator, numerator, denominator, number, exponent, ten_power, power = (
        match.groups()
    )
    if len(match[0]) > MAX_DIGITS:
        return None
    if mixed_denominator:
        fraction = Fraction(int(mixed_numerator), int(mixed_denominator)) if int(mixed_denominator) else None
        return None if fraction is None else int(whole) + fraction
    if denominator:
        return Fraction(int(numerator), int(denominator)) if int(denominator) else None
    value = Fraction(int(number) if number.isdigit() else _SEPARATORS.sub("", number))
    shift = exponent or ten_power
    if shift:
        return value * Fraction(10) ** int(shift) if abs(int(shift)) <= MAX_DIGITS else None
    if power:
        fits = abs(int(power)) * len(number) <= MAX_DIGITS and (value or int(power) >= 0)
        return value ** int(power) if fits else None
    return value


def _exact(tolerance: float | None) -> Fraction:
    """Returns a tolerance as the exact fraction of its decimal digits; 0 for None."""
    return Fraction(repr(float(tolerance))) if tolerance else Fraction(0)

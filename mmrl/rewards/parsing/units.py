"""Units of measurement after a number."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

_PREFIXES = {"n": -9, "\u03bc": -6, "u": -6, "m": -3, "c": -2, "d": -1, "k": 3, "M": 6, "G": 9, "T": 12}
_PREFIX_NAMES = {"nano": -9, "micro": -6, "milli": -3, "centi": -2, "deci": -1, "kilo": 3, "mega": 6, "giga": 9}
_SYMBOLS = {
    "m": ("m", 1),
    "g": ("g", 1),
    "s": ("s", 1),
    "l": ("l", 1),
    "L": ("l", 1),
    "V": ("V", 1),
    "A": ("A", 1),
    "W": ("W", 1),
    "J": ("J", 1),
    "N": ("N", 1),
    "Pa": ("Pa", 1),
    "Hz": ("Hz", 1),
    "eV": ("eV", 1),
    "mol": ("mol", 1),
    "Wh": ("J", 3600),
    "\u03a9": ("Ohm", 1),
}
_NAMES = {
    "meter": "m",
    "metre": "m",
    "gram": "g",
    "gramme": "g",
    "second": "s",
    "liter": "l",
    "litre": "l",
    "volt": "V",
    "amp": "A",
    "ampere": "A",
    "watt": "W",
    "joule": "J",
    "newton": "N",
    "pascal": "Pa",
    "hertz": "Hz",
    "ohm": "\u03a9",
    "mole": "mol",
}
_OTHERS: dict[str, tuple[str, Fraction]] = {
    **dict.fromkeys(("sec", "secs"), ("s", Fraction(1))),
    **dict.fromkeys(("min", "mins", "minute", "minutes"), ("s", Fraction(60))),
    **dict.fromkeys(("h", "hr", "hrs", "hour", "hours"), ("s", Fraction(3600))),
    **dict.fromkeys(("day", "days"), ("s", Fraction(86400))),
    **dict.fromkeys(("week", "weeks"), ("s", Fraction(604800))),
    **dict.fromkeys(("month", "months"), ("month", Fraction(1))),
    **dict.fromkeys(("year", "years", "yr", "yrs"), ("month", Fraction(12))),
    **dict.fromkeys(("inch", "inches"), ("m", Fraction(254, 10000))),
    **dict.fromkeys(("ft", "foot", "feet"), ("m", Fraction(3048, 10000))),
    **dict.fromkeys(("yd", "yard", "yards"), ("m", Fraction(9144, 10000))),
    **dict.fromkeys(("mi", "mile", "miles"), ("m", Fraction(1609344, 1000))),
    **dict.fromkeys(("lb", "lbs"), ("g", Fraction(45359237, 100000))),
    **dict.fromkeys(("oz", "ounce", "ounces"), ("g", Fraction(28349523125, 10**9))),
    **dict.fromkeys(("tonne", "tonnes"), ("g", Fraction(10**6))),
    **dict.fromkeys(("\xb0", "deg", "degree", "degrees"), ("degree", Fraction(1))),
    **dict.fromkeys(("\xb0C", "Celsius", "celsius"), ("Celsius", Fraction(1))),
    **dict.fromkeys(("\xb0F", "Fahrenheit", "fahrenheit"), ("Fahrenheit", Fraction(1))),
    **dict.fromkeys(("K", "kelvin"), ("kelvin", Fraction(1))),
    **dict.fromkeys(("rad", "radian", "radians"), ("radian", Fraction(1))),
    **dict.fromkeys(("%", "percent"), ("%", Fraction(1))),
    **dict.fromkeys(("$", "USD", "dollar", "dollars"), ("$", Fraction(1))),
    **dict.fromkeys(("cent", "cents", "\xa2"), ("$", Fraction(1, 100))),
    **dict.fromkeys(("\u20ac", "EUR", "euro", "euros"), ("EUR", Fraction(1))),
    **dict.fromkeys(("\xa3", "GBP"), ("GBP", Fraction(1))),
    **dict.fromkeys(("\xa5", "JPY", "yen"), ("JPY", Fraction(1))),
    **dict.fromkeys(("\u20b9", "INR", "rupee", "rupees"), ("INR", Fraction(1))),
}
CURRENCIES = "$\u20ac\xa3\xa5\u20b9"
_ONE = r"[A-Za-z\u03bc\u03a9\xb0%$\xa2\u20ac\xa3\xa5\u20b9]{1,12}(?:\^?-?[1-4](?!\d))?+"
_UNIT = re.compile(rf"\s?({_ONE}(?:\s?[/*]\s?{_ONE}|\s?per\s{_ONE})*+)(?!\w)")
_FACTOR = re.compile(r"(/|\bper\b)?\s?\*?\s?([^\s\d^/*-]+)\^?(-?\d)?")


@dataclass(frozen=True)
class Unit:
    """A unit of measurement. scale: base units in one of this unit. dimension: the base units with their powers."""

    scale: Fraction
    dimension: tuple[tuple[str, int], ...]


def unit_at(text: str, position: int) -> Unit | None:
    """Returns the unit at `position` of a text, or after one space there; None if there is no known one."""
    match = _UNIT.match(text, position)
    return None if match is None else _unit(match[1])


@lru_cache(maxsize=4096)
def _unit(text: str) -> Unit | None:
    """Parses a unit such as km/h or m^2 into its scale and the powers of base units; None if it is unknown.

    If a factor is unknown, only the first word is read: "km away" is km.
    """
    scale, powers = Fraction(1), dict[str, int]()
    for division, name, exponent in _FACTOR.findall(text):
        factor = _factor(name)
        if factor is None:
            return _unit(text.split()[0]) if " " in text else None
        power = int(exponent or 1) * (-1 if division else 1)
        base, size = factor
        scale *= size**power
        powers[base] = powers.get(base, 0) + power
    return Unit(scale, tuple(sorted((base, power) for base, power in powers.items() if power)))


def _factor(name: str) -> tuple[str, Fraction] | None:
    """Returns the base unit of a unit such as km, and how many base units it has; None if the unit is unknown."""
    if name in _OTHERS:
        return _OTHERS[name]
    for symbol, exponent in (("", 0), *_PREFIXES.items()):
        if name.startswith(symbol) and (entry := _SYMBOLS.get(name.removeprefix(symbol))):
            return entry[0], entry[1] * Fraction(10) ** exponent
    lower = name.lower()
    for prefix, exponent in (("", 0), *_PREFIX_NAMES.items()):
        stem = lower.removeprefix(prefix)
        if lower.startswith(prefix) and (symbol := _NAMES.get(stem) or _NAMES.get(stem.removesuffix("s"), "")):
            entry = _SYMBOLS[symbol]
            return entry[0], entry[1] * Fraction(10) ** exponent
    return None

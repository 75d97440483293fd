"""Answers in mathematics, compared by math-verify."""

from __future__ import annotations

import logging
import re
from typing import Any

from mmrl.rewards.parsing.responses import extract_from, full_response, gold_text, golds, stated
from mmrl.rewards.parsing.typography import plain
from mmrl.rewards.types import Reward
from mmrl.rollouts import Sample

_ROOT = re.compile("\u221a\\s*+(?:\\(([^()]*+)\\)|\\{([^{}]*+)\\}|([A-Za-z]|\\d++))")
_MIXED = re.compile(r"(?<![\w/.^_{(])(\d++)[ ]++(\d++)/(\d++)(?![\w/.])")


def math(*, precision: int = 6) -> Reward:
    """1 where math-verify finds the response equal to the gold answer, 0 where not; None where the gold does not parse.

    Fractions, powers, roots and digits of all scripts are turned into LaTeX before. Numbers are rounded to `precision`
    places; those below 1 have to agree in as many significant ones.

    Build it through the registry, which runs it in a process with a deadline: symbolic simplification may take for
    ever.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    for name in ("math_verify", "math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # it logs a traceback for each answer it cannot read
    kinds = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]

    def parsed(text: str) -> list:
        # its own timeouts use SIGALRM, which works in a main thread only; here the deadline is that of the process
        return parse(text, kinds, parsing_timeout=None, raise_on_error=False)

    def same(gold: list, response: list) -> bool:
        equal = verify(gold, response, float_rounding=precision, timeout_seconds=None)
        return equal and not _differ_below_one(gold, response, precision)

    def reward(sample: Sample) -> float | None:
        wanted = [parsed(_delimited(_latex(gold_text(str(gold))))) for gold in golds(sample)]
        if not all(wanted):
            return None
        remainder = stated(full_response(sample)).strip()
        answer = extract_from(remainder)
        if not answer:
            return 0.0
        whole = answer == remainder  # prose, perhaps, with the result somewhere in it
        answer = _latex(answer)
        response = (whole and parsed(answer)) or parsed(_delimited(answer))
        return float(any(same(gold, response) for gold in wanted))

    return reward


def _latex(text: str) -> str:
    """LaTeX for what Unicode has characters for, and for mixed numbers."""
    if not text.isascii():
        text = plain(_ROOT.sub(_root, text), power="^{{{}}}", fraction="\\frac{{{}}}{{{}}}")
    return _MIXED.sub(r"\1\\frac{\2}{\3}", text)


def _root(match: re.Match[str]) -> str:
    return f"\\sqrt{{{match[1] or match[2] or match[3]}}}"


def _delimited(text: str) -> str:
    """Dollar signs around a string without any: LaTeX is looked for between delimiters."""
    return text if "$" in text or "\\boxed" in text else f"${text}$"


def _differ_below_one(gold: list, response: list, precision: int) -> bool:
    """Returns whether both sides are numbers below 1 that only rounding to `precision` places made equal."""
    pairs = [(_number(a), _number(b)) for a in gold for b in response]
    numbers = [(a, b) for a, b in pairs if a is not None and b is not None]
    small = [(a, b) for a, b in numbers if max(abs(a), abs(b)) < 1]
    return bool(small) and len(small) == len(numbers) and all(_apart(a, b, precision) for a, b in small)


def _apart(a: Any, b: Any, precision: int) -> bool:
    return abs(a - b) > max(abs(a), abs(b)) / 10**precision


def _number(expression: Any) -> Any:
    """A finite real number as sympy has it, 30 digits of it; None for anything else."""
    from sympy import Expr

    if not isinstance(expression, Expr) or not expression.is_number:
        return None
    value = expression.evalf(30)
    return value if value.is_Float or value.is_Rational else None

"""A reward for mathematical answers, which math-verify compares."""

from __future__ import annotations

import logging
import re
from typing import Any

from mmrl.rewards.parsing.responses import (
    answer_in_text,
    full_response,
    gold_answer_text,
    gold_answers,
    without_thoughts,
)
from mmrl.rewards.parsing.typography import normalize_typography
from mmrl.rewards.types import Reward
from mmrl.rollouts import Sample

_ROOT = re.compile("\u221a\\s*+(?:\\(([^()]*+)\\)|\\{([^{}]*+)\\}|([A-Za-z]|\\d++))")
_MIXED_NUMBER = re.compile(r"(?<![\w/.^_{(])(\d++)[ ]++(\d++)/(\d++)(?![\w/.])")


def math(*, precision: int = 6) -> Reward:
    """Builds a reward: 1 if math-verify finds the response equal to the gold answer, else 0; None if the gold does not
    parse.

    Fractions, powers, roots and digits of all scripts are converted to LaTeX first. precision: decimal places to which
    numbers are rounded; numbers below 1 have to agree in as many significant digits. Build it through the registry,
    which runs it in a process with a deadline, since symbolic simplification may never end.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    for name in ("math_verify", "math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # it logs a traceback for each answer it cannot read
    extractions = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]

    def parse_math(text: str) -> list:
        # no timeout of its own: that uses SIGALRM, which works in the main thread only; the process has a deadline
        return parse(text, extractions, parsing_timeout=None, raise_on_error=False)

    def is_equal(gold: list, response: list) -> bool:
        equal = verify(gold, response, float_rounding=precision, timeout_seconds=None)
        return equal and not _differ_below_one(gold, response, precision)

    def reward(sample: Sample) -> float | None:
        """Returns 1 if the answer equals a gold answer, else 0; None if a gold answer does not parse."""
        gold_expressions = [
            parse_math(_with_delimiters(_to_latex(gold_answer_text(str(gold))))) for gold in gold_answers(sample)
        ]
        if not all(gold_expressions):
            return None
        remainder = without_thoughts(full_response(sample)).strip()
        answer = answer_in_text(remainder)
        if not answer:
            return 0.0
        is_full_text = answer == remainder  # perhaps prose: first parsed without delimiters
        answer = _to_latex(answer)
        response = (is_full_text and parse_math(answer)) or parse_math(_with_delimiters(answer))
        return float(any(is_equal(gold, response) for gold in gold_expressions))

    return reward


def _to_latex(text: str) -> str:
    """Converts Unicode powers, fractions and roots, and mixed numbers, to LaTeX."""
    if not text.isascii():
        text = normalize_typography(_ROOT.sub(_root_to_latex, text), power="^{{{}}}", fraction="\\frac{{{}}}{{{}}}")
    return _MIXED_NUMBER.sub(r"\1\\frac{\2}{\3}", text)


def _root_to_latex(match: re.Match[str]) -> str:
    return f"\\sqrt{{{match[1] or match[2] or match[3]}}}"


def _with_delimiters(text: str) -> str:
    """Puts dollar signs around a string that has none, since math-verify searches for LaTeX between delimiters."""
    return text if "$" in text or "\\boxed" in text else f"${text}$"


def _differ_below_one(gold: list, response: list, precision: int) -> bool:
    """Returns whether the gold answer and the response are numbers below 1 that are equal only because they were
    rounded to `precision` decimal places. gold, response: the parsed readings of each."""
    pairs = [(_number(a), _number(b)) for a in gold for b in response]
    numbers = [(a, b) for a, b in pairs if a is not None and b is not None]
    small = [(a, b) for a, b in numbers if max(abs(a), abs(b)) < 1]
    return bool(small) and len(small) == len(numbers) and all(_differ(a, b, precision) for a, b in small)


def _differ(a: Any, b: Any, precision: int) -> bool:
    """Returns whether two numbers differ in their first `precision` significant digits."""
    return abs(a - b) > max(abs(a), abs(b)) / 10**precision


def _number(expression: Any) -> Any:
    """Returns the value of a sympy expression with 30 digits; None unless it is a finite real number."""
    from sympy import Expr

    if not isinstance(expression, Expr) or not expression.is_number:
        return None
    value = expression.evalf(30)
    return value if value.is_Float or value.is_Rational else None

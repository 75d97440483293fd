"""A reward of programs that have to pass unit tests."""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from mmrl.errors import UserError
from mmrl.rewards.programs.responses import extract_program
from mmrl.rewards.programs.runner import ProgramReward
from mmrl.rewards.types import Score
from mmrl.rollouts import Prompt, Sample


class UnitTests(ProgramReward):
    """1 if the Python program in a response passes all its tests, else 0. partial: the share of tests that it passes
    instead.

    A program that raises, hangs or ends its process passes none. The row's answer holds the tests, in the form of code
    data sets: {"inputs": [...], "outputs": [...]}, also as JSON text. With "fn_name", the inputs are lists of arguments
    of that function, or of that method of a class Solution. Without it, they are texts for the standard input, and
    outputs are what is printed. The answer may also be a list of strings `assert f(1) == 2`, whose right side is a
    literal, `assert f(1)` or `assert not f(1)`.

    Outputs are compared in this process; the program's process never holds the expected ones. Printed lines are
    compared without space at their ends, numbers within `tolerance`, relative or absolute. deadline_s is for all tests
    of a program. The other options are those of `ProgramRunner`.
    """

    kind = "tested"

    def __init__(
        self,
        *,
        partial: bool = False,
        tolerance: float = 1e-6,
        **options: Any,
    ) -> None:
        self.partial, self.tolerance = partial, tolerance
        super().__init__(**options)

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        """Scores programs. Raises UserError for a row whose answer has no tests."""
        # of each sample: the kind of its tests, the calls or inputs, and the expected outputs
        tests = [read_tests(sample.prompt) for sample in samples]
        scores: list[Score] = [0.0] * len(samples)
        rows = [row for row, sample in enumerate(samples) if extract_program(sample)]
        answers = self.runner.run(
            [{"source": extract_program(samples[row]), tests[row][0]: tests[row][1]} for row in rows]
        )
        for row, answer in zip(rows, answers, strict=True):
            kind, _, expected = tests[row]
            scores[row] = self._pass_rate(answer, expected, printed=kind == "inputs")
        return scores

    def _pass_rate(self, answer: Mapping[str, Any], expected: list[Any], *, printed: bool) -> float:
        """Returns the score of a program, 0 to 1. answer: what the executor returned, with the program's "outputs".
        expected: the right outputs, in the same order. printed: outputs are printed texts, not JSON."""
        outputs = answer.get("outputs")
        if not isinstance(outputs, list) or len(outputs) != len(expected):
            return 0.0
        is_equal = _printed_same if printed else _json_same
        passed = [is_equal(output, target, self.tolerance) for output, target in zip(outputs, expected, strict=True)]
        return sum(passed) / len(passed) if self.partial else float(all(passed))


def read_tests(prompt: Prompt) -> tuple[str, list[Any], list[Any]]:
    """Returns the kind of a row's tests, "calls" or "inputs"; these calls or inputs; and the expected outputs. Raises
    UserError if the answer has no tests."""
    tests = prompt.answer
    if isinstance(tests, str) and tests.lstrip()[:1] in ("{", "["):
        try:
            tests = json.loads(tests)
        except ValueError as error:
            raise UserError(f"prompt {prompt.id!r}: the tests in its answer are not JSON: {error}") from None
    if isinstance(tests, str):
        tests = [line for line in tests.splitlines() if line.strip()]
    if isinstance(tests, list) and tests and all(isinstance(test, str) for test in tests):
        pairs = [_assertion(prompt, test) for test in tests]
        return "calls", [call for call, _ in pairs], [value for _, value in pairs]
    if not isinstance(tests, Mapping) or not isinstance(tests.get("inputs"), list) or not tests["inputs"]:
        raise UserError(
            f"prompt {prompt.id!r}: its answer holds no tests; write an object with inputs and outputs, or lines "
            "`assert f(...) == literal`"
        )
    inputs, outputs, name = tests["inputs"], tests.get("outputs"), tests.get("fn_name")
    if not isinstance(outputs, list) or len(outputs) != len(inputs):
        actual = len(outputs) if isinstance(outputs, list) else "no list"
        raise UserError(
            f"prompt {prompt.id!r}: its answer must have as many outputs as inputs, {len(inputs)}, but has {actual}"
        )
    if name is None:
        return "inputs", [_to_text(value) for value in inputs], [_to_text(value) for value in outputs]
    return "calls", [(str(name), _arguments(value)) for value in inputs], [_parse_json(value) for value in outputs]


def _assertion(prompt: Prompt, test: str) -> tuple[str, Any]:
    """Splits `assert left == literal` into the text of its left side and the value of its right side. `assert f(1)`
    expects True, `assert not f(1)` False.

    Raises UserError for any other form: the program would get the expected value with it.
    """
    try:
        statement = ast.parse(test.strip()).body[0]
        if not isinstance(statement, ast.Assert):
            raise ValueError
        expression = statement.test
        if isinstance(expression, ast.Compare) and len(expression.ops) == 1 and isinstance(expression.ops[0], ast.Eq):
            return ast.unparse(expression.left), _to_json_types(ast.literal_eval(expression.comparators[0]))
        expected = not (isinstance(expression, ast.UnaryOp) and isinstance(expression.op, ast.Not))
        call = expression if expected else expression.operand  # type: ignore[attr-defined]
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            raise ValueError
        for argument in call.args:
            ast.literal_eval(argument)
        return f"bool({ast.unparse(call)})", expected
    except (SyntaxError, TypeError, ValueError, IndexError):
        raise UserError(
            f"prompt {prompt.id!r}: a test in its answer is not of the form `assert f(...) == literal`: {test!r:.120}"
        ) from None


def _to_text(value: Any) -> str:
    """Converts a value to text; a list becomes lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _arguments(value: Any) -> list[Any]:
    """Returns the arguments of a call: a list, or, as in LeetCode, one JSON value on each line."""
    return [json.loads(line) for line in value.splitlines() if line.strip()] if isinstance(value, str) else list(value)


def _parse_json(value: Any) -> Any:
    """Parses a string that is JSON. Other values are returned unchanged."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _to_json_types(value: Any) -> Any:
    """Converts a literal to JSON's types: tuples and sets become lists, keys strings."""
    return json.loads(json.dumps(value, default=sorted))


def _json_same(text: object, expected: Any, tolerance: float) -> bool:
    """Returns whether a JSON text is the expected value, with floats within the tolerance. A value also equals a
    list that holds this value alone."""
    if not isinstance(text, str):
        return False
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return _same(value, expected, tolerance) or (isinstance(expected, list) and _same([value], expected, tolerance))


def _same(value: Any, expected: Any, tolerance: float) -> bool:
    """Returns whether two values are equal, with floats within the tolerance. Booleans never equal numbers."""
    if isinstance(value, bool) or isinstance(expected, bool):
        return value is expected
    if isinstance(value, int | float) and isinstance(expected, int | float):
        exact = isinstance(value, int) and isinstance(expected, int)
        return value == expected if exact else math.isclose(value, expected, rel_tol=tolerance, abs_tol=tolerance)
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(_same, value, expected, [tolerance] * len(value)))
    if isinstance(value, dict) and isinstance(expected, dict):
        return value.keys() == expected.keys() and all(_same(value[key], expected[key], tolerance) for key in value)
    return bool(value == expected)


def _printed_same(text: object, expected: str, tolerance: float) -> bool:
    """Returns whether printed output equals the expected one, line by line and word by word, with floats within the
    tolerance."""
    if not isinstance(text, str):
        return False
    lines, expected_lines = ([line.split() for line in t.strip().splitlines()] for t in (text, expected))
    if len(lines) != len(expected_lines):
        return False
    for words, expected_words in zip(lines, expected_lines, strict=True):
        if len(words) != len(expected_words):
            return False
        if not all(map(_word_same, words, expected_words, [tolerance] * len(words))):
            return False
    return True


def _word_same(word: str, expected: str, tolerance: float) -> bool:
    """Returns whether two words are equal, or floats within the tolerance."""
    if word == expected:
        return True
    if not {".", "e", "E"} & set(word + expected):
        return False  # whole numbers and words are equal or not
    try:
        return math.isclose(float(word), float(expected), rel_tol=tolerance, abs_tol=tolerance)
    except ValueError:
        return False

"""Programs that have to pass tests."""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from mmrl.errors import UserError
from mmrl.rewards.programs.responses import program
from mmrl.rewards.programs.runner import ProgramReward
from mmrl.rewards.types import Score
from mmrl.rollouts import Prompt, Sample


class UnitTests(ProgramReward):
    """Tests of the Python program in a response: the share that it passes with partial=True, else 1 where it passes
    all and 0 where not. A program that raises, hangs or ends its process passes none.

    The row's answer holds the tests, as data sets of programs have them: {"inputs": [...], "outputs": [...]}, also as
    JSON text; with "fn_name" the inputs are lists of arguments of that function (or of that method of a class
    Solution), without it texts for the standard input, and outputs what is printed. Or it is a list of strings
    `assert f(1) == 2`, whose right side is a literal, `assert f(1)` or `assert not f(1)`. Outputs are compared here:
    the program's process never holds them. Printed lines are equal without space at their ends, numbers within
    `tolerance` of their size.

    deadline_s is for all tests of a program; the rest as in `ProgramRunner`.
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
        """Scores programs; raises UserError for a row whose answer has no tests."""
        tests = [read_tests(sample.prompt) for sample in samples]
        scores: list[Score] = [0.0] * len(samples)
        rows = [row for row, sample in enumerate(samples) if program(sample)]
        answers = self.runner.run([{"source": program(samples[row]), tests[row][0]: tests[row][1]} for row in rows])
        for row, answer in zip(rows, answers, strict=True):
            scores[row] = self._share(answer, tests[row][2], printed=tests[row][0] == "inputs")
        return scores

    def _share(self, answer: Mapping[str, Any], expected: list[Any], *, printed: bool) -> float:
        outputs = answer.get("outputs")
        if not isinstance(outputs, list) or len(outputs) != len(expected):
            return 0.0
        same = _printed_same if printed else _json_same
        passed = [same(out, wanted, self.tolerance) for out, wanted in zip(outputs, expected, strict=True)]
        return sum(passed) / len(passed) if self.partial else float(all(passed))


def read_tests(prompt: Prompt) -> tuple[str, list[Any], list[Any]]:
    """Returns the kind of a row's tests, "calls" or "inputs", these, and the outputs that they expect. Raises UserError
    where the answer has none."""
    tests = prompt.answer
    if isinstance(tests, str) and tests.lstrip()[:1] in ("{", "["):
        try:
            tests = json.loads(tests)
        except ValueError as error:
            raise UserError(f"prompt {prompt.id!r}: its tests are not JSON: {error}") from None
    if isinstance(tests, str):
        tests = [line for line in tests.splitlines() if line.strip()]
    if isinstance(tests, list) and tests and all(isinstance(test, str) for test in tests):
        pairs = [_assertion(prompt, test) for test in tests]
        return "calls", [call for call, _ in pairs], [value for _, value in pairs]
    if not isinstance(tests, Mapping) or not isinstance(tests.get("inputs"), list) or not tests["inputs"]:
        raise UserError(f"prompt {prompt.id!r}: unit_tests needs an answer with inputs and outputs, or assertions")
    inputs, outputs, name = tests["inputs"], tests.get("outputs"), tests.get("fn_name")
    if not isinstance(outputs, list) or len(outputs) != len(inputs):
        raise UserError(f"prompt {prompt.id!r}: its {len(inputs)} inputs have no outputs of the same number")
    if name is None:
        return "inputs", [_lines(one) for one in inputs], [_lines(one) for one in outputs]
    return "calls", [(str(name), _arguments(one)) for one in inputs], [_parsed(one) for one in outputs]


def _assertion(prompt: Prompt, test: str) -> tuple[str, Any]:
    """Splits `assert left == literal` into the text of its left side and the value of its right side; `assert f(1)` and
    `assert not f(1)` expect a truth. Anything else would show the program what is expected."""
    try:
        statement = ast.parse(test.strip()).body[0]
        if not isinstance(statement, ast.Assert):
            raise ValueError
        compared = statement.test
        if isinstance(compared, ast.Compare) and len(compared.ops) == 1 and isinstance(compared.ops[0], ast.Eq):
            return ast.unparse(compared.left), _plain(ast.literal_eval(compared.comparators[0]))
        truth = not (isinstance(compared, ast.UnaryOp) and isinstance(compared.op, ast.Not))
        called = compared if truth else compared.operand  # type: ignore[attr-defined]
        if not isinstance(called, ast.Call) or not isinstance(called.func, ast.Name):
            raise ValueError
        for argument in called.args:
            ast.literal_eval(argument)
        return f"bool({ast.unparse(called)})", truth
    except (SyntaxError, TypeError, ValueError, IndexError):
        raise UserError(f"prompt {prompt.id!r}: its test is not `assert f(...) == literal`: {test!r:.120}") from None


def _lines(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _arguments(value: Any) -> list[Any]:
    """Arguments of a call: a list, or, as LeetCode writes them, one JSON value per line."""
    return [json.loads(line) for line in value.splitlines() if line.strip()] if isinstance(value, str) else list(value)


def _parsed(value: Any) -> Any:
    if isinstance(value, str):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _plain(value: Any) -> Any:
    """A literal as JSON knows it: tuples and sets are lists, keys texts."""
    return json.loads(json.dumps(value, default=sorted))


def _json_same(text: object, expected: Any, tolerance: float) -> bool:
    """Returns whether JSON is the expected value, floats within the tolerance; a single value also equals a list of
    it."""
    if not isinstance(text, str):
        return False
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return _same(value, expected, tolerance) or (isinstance(expected, list) and _same([value], expected, tolerance))


def _same(value: Any, expected: Any, tolerance: float) -> bool:
    """Returns whether a result is the expected one; floats within the tolerance, booleans never equal to numbers."""
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
    """Returns whether printed output is the expected one, word by word and line by line, floats within the
    tolerance."""
    if not isinstance(text, str):
        return False
    lines, wanted = ([line.split() for line in one.strip().splitlines()] for one in (text, expected))
    return len(lines) == len(wanted) and all(
        len(ours) == len(theirs) and all(map(_word_same, ours, theirs, [tolerance] * len(ours)))
        for ours, theirs in zip(lines, wanted, strict=True)
    )


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

"""A safe evaluator of arithmetic expressions: it knows a few functions only, and bounds all numbers."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Annotated, Any

from mmrl.sims.turns.tools import Tool, ToolError

LONGEST = 200  # characters
LARGEST = 1e15  # of any intermediate number
BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: math.pow,
}
FUNCTIONS: dict[str, Callable[[Any], Any]] = {"sqrt": math.sqrt, "abs": abs, "round": round}


def value(expression: str) -> float:
    """Evaluates an expression. Raises ToolError if it is not arithmetic, or a number exceeds LARGEST."""
    if len(expression) > LONGEST:
        raise ToolError(f"an expression has at most {LONGEST} characters")
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError, MemoryError, RecursionError) as error:
        raise ToolError(f"{expression!r:.60} cannot be computed ({error})") from None


def _value(node: ast.expr) -> float:
    """Evaluates the syntax tree of an expression. Raises ToolError for other syntax, and for a number above LARGEST."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        number: Any = node.value
    elif isinstance(node, ast.BinOp) and type(node.op) in BINARY:
        number = BINARY[type(node.op)](_value(node.left), _value(node.right))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        number = _value(node.operand) * (-1 if isinstance(node.op, ast.USub) else 1)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS:
        number = FUNCTIONS[node.func.id](*map(_value, node.args))
    else:
        raise ToolError("only numbers, + - * / // % **, brackets and " + ", ".join(FUNCTIONS))
    if not abs(number) <= LARGEST:  # true for NaN, too
        raise ToolError(f"a number above {LARGEST:g}")
    return number


def calculator() -> Tool:
    """Returns the tool that evaluates arithmetic expressions."""

    def compute(expression: Annotated[str, "such as (2 + 3) * 4"]) -> str:
        """Computes an arithmetic expression."""
        number = value(expression)
        return f"{number:.12g}"

    return Tool.of(compute, "calculator")

"""The package as a graph: its modules, and every arrow from one to another."""

import ast
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
FOLDERS = ("mmrl", "tasks", "sims")
NAMED = re.compile(r"mmrl(\.\w+)+(:\w+)?")


class Arrow(NamedTuple):
    """An import, or a string that names a module. kind: import, typing (for type checkers alone), lazy (inside a
    function) or string. target: the full name; of `from a import b` it is a.b."""

    line: int
    target: str
    kind: str


def modules() -> dict[str, Path]:
    """Every module of the package by its name; `mmrl.tasks` and `mmrl.sims` lie beside the package's folder."""
    found = {}
    for path in (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        found[name if name.split(".")[0] == "mmrl" else f"mmrl.{name}"] = path
    return found


def arrows(source: str, module: str, is_package: bool = False) -> list[Arrow]:
    """All arrows of a module, also those for type checkers, from inside functions, and by strings that are not
    docstrings."""
    found: list[Arrow] = []

    def visit(node: ast.AST, kind: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                continue  # a docstring
            if isinstance(child, ast.Import):
                found.extend(Arrow(child.lineno, alias.name, kind) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                above = module.split(".")[: -(child.level - is_package) or None] if child.level else []
                base = ".".join([*above, *([child.module] if child.module else [])])
                found.extend(Arrow(child.lineno, f"{base}.{alias.name}", kind) for alias in child.names)
            elif isinstance(child, ast.Constant) and isinstance(child.value, str) and NAMED.fullmatch(child.value):
                found.append(Arrow(child.lineno, child.value.replace(":", "."), "string"))
            elif isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
                for statement in child.body:
                    visit(ast.Module([statement], []), "typing")
                for statement in child.orelse:
                    visit(ast.Module([statement], []), kind)
            else:
                inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                visit(child, "lazy" if inside and kind != "typing" else kind)

    visit(ast.parse(source), "import")
    return found


def owner(target: str, known: dict[str, Path]) -> str | None:
    """The module that a full name is, or is a member of; None for one outside the package."""
    while target not in known and "." in target:
        target = target.rpartition(".")[0]
    return target if target in known else None


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules each of which leads to all others of its group, by Tarjan's algorithm."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def walk(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph[node]):
            if other not in index:
                walk(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == index[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1 or node in graph[node]:
                found.append(sorted(group))

    for node in graph:
        if node not in index:
            walk(node)
    return found

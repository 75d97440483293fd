"""Reads configurations of other systems: YAML, JSON, the arguments of a shell script, or a Python function that fills a
configuration (ml_collections, as flow_grpo has it)."""

from __future__ import annotations

import ast
import json
import operator
import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from mmrl.errors import UserError

Settings = dict[str, Any]  # by dotted keys
_VARIABLE = re.compile(r"\$\{?([A-Za-z_]\w*)(?::-([^}]*))?\}?")
_ASSIGNED = re.compile(r"^\s*(?:export\s+)?([A-Za-z_]\w*)=(\"[^\"]*\"|'[^']*'|\S*)\s*(?:#.*)?$", re.MULTILINE)
_OVERRIDE = re.compile(r"^\+{0,2}([A-Za-z_][\w.]*)=(.*)$", re.DOTALL)
NUMERIC: dict[str, Callable[..., Any]] = {"int": int, "float": float, "max": max, "min": min, "round": round}
_WHOLE = re.compile(r"^\$\{([\w.]+)\}$")


def read_settings(path: Path) -> Settings:
    """Returns the settings of a file by dotted keys. path: of a Python file also FILE.py:FUNCTION.

    Raises UserError for a file that can not be read, or that has no settings.
    """
    file, _, function = str(path).partition(".py:")
    if function:
        return python_settings(_text(Path(f"{file}.py")), function, file + ".py")
    text = _text(path)
    if path.suffix == ".py":
        return python_settings(text, None, str(path))
    if path.suffix in (".yaml", ".yml", ".json"):
        return tree_settings(text, path)
    return shell_settings(text, path.parent)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: {error}") from None


# --- YAML and JSON ---


def tree_settings(text: str, path: Path) -> Settings:
    """Returns the settings of a YAML or JSON file, with ${section.key} replaced where that key is set."""
    try:
        tree = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path}: not valid {path.suffix[1:].upper()}: {' '.join(str(error).split())}") from None
    if not isinstance(tree, Mapping):
        raise UserError(f"{path}: expected a mapping at the top level")
    settings = {key: number(value) for key, value in flat(tree).items()}
    return {key: _resolved(value, settings) for key, value in settings.items()}


def flat(tree: Mapping[str, Any], above: str = "") -> Settings:
    """Returns the leaves of a tree by dotted keys; lists and empty mappings are values."""
    leaves: Settings = {}
    for name, value in tree.items():
        nested = isinstance(value, Mapping) and value
        leaves |= flat(value, f"{above}{name}.") if nested else {f"{above}{name}": value}
    return leaves


def _resolved(value: Any, settings: Settings, depth: int = 8) -> Any:
    """Returns the value that an interpolation refers to, or the text itself where it can not be known."""
    match = _WHOLE.match(value) if isinstance(value, str) else None
    if match is None or match[1] not in settings or not depth:
        return value
    return _resolved(settings[match[1]], settings, depth - 1)


def number(value: Any) -> Any:
    """Returns a string such as 5e-6, which YAML does not read as a number, as a float; other values unchanged."""
    try:
        return float(value) if isinstance(value, str) and re.match(r"^[-+]?[\d.]+e[-+]?\d+$", value) else value
    except ValueError:
        return value


# --- shell scripts ---


def shell_settings(text: str, folder: Path) -> Settings:
    """Returns the arguments of a script's last command that has any: KEY=VALUE, --key VALUE ... and --key=VALUE.
    Variables that the script sets are filled in; others stay as $NAME. config=FILE is read first, where it is there."""
    joined = re.sub(r"\\\s*\n", " ", text)
    lines = [line for line in joined.splitlines() if not line.lstrip().startswith("#")]
    variables = {name: value.strip("\"'") for name, value in _ASSIGNED.findall("\n".join(lines))}
    commands = [_arguments(_filled(_filled(line, variables), variables)) for line in lines]
    settings = max(commands, key=len, default={})
    named = settings.pop("config", None)
    base = _base_file(str(named), folder) if isinstance(named, str) else None
    if named is not None and base is None:
        settings["config"] = named
    return ({} if base is None else read_settings(base)) | settings


def _base_file(name: str, folder: Path) -> Path | None:
    """Returns the file that a script refers to, below its own folder or one above it."""
    folders = (folder, *folder.resolve().parents)
    return next((parent / name for parent in folders if (parent / name).is_file()), None)


def _filled(text: str, variables: Mapping[str, str]) -> str:
    return _VARIABLE.sub(lambda match: variables.get(match[1], match[2] or match[0]), text)


def _arguments(line: str) -> Settings:
    """Returns the arguments of one command; none for a line that only sets variables."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        return {}
    begins = next((i for i, word in enumerate(words) if not re.match(r"^[A-Za-z_]\w*=", word)), len(words))
    if begins < len(words) and words[begins] in ("export", "set", "echo"):
        return {}
    processes = dict(word.split("=", 1) for word in words[:begins])
    settings: Settings = {}
    flag: str | None = None
    for word in words[begins + 1 :]:
        override = _OVERRIDE.match(word)
        if word.startswith("--"):
            flag, equals, value = word[2:].partition("=")
            settings[flag] = _value(value) if equals else True
            flag = None if equals else flag
        elif word.startswith("-") or (word.endswith(".py") and flag is not None and settings[flag] is not True):
            flag = None  # of the interpreter, or the script whose flags follow
        elif flag is not None:
            settings[flag] = _joined(settings[flag], _value(word))
        elif override is not None:
            settings[override[1]] = _value(override[2])
    if settings and "NPROC_PER_NODE" in processes:
        settings.setdefault("num_processes", _value(processes["NPROC_PER_NODE"]))
    return settings


def _joined(before: Any, value: Any) -> Any:
    """Returns the values of a flag so far and one more."""
    if before is True:
        return value
    return [*(before if isinstance(before, list) else [before]), value]


def _value(word: str) -> Any:
    try:
        value = number(yaml.safe_load(word))
    except yaml.YAMLError:
        return word
    return {"True": True, "False": False, "None": None}.get(word, word if isinstance(value, str) else value)


# --- Python ---

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARED: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


def python_settings(text: str, function: str | None, name: str) -> Settings:
    """Returns what a function of a Python file assigns to `config`. Nothing is run: literals, arithmetic, names of what
    was assigned before, int(), f-strings and os.path.join are read, a function that begins with another's result too;
    what else stands there stays as its text.

    Raises UserError where there is no such function, or several and none is named.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise UserError(f"{name}: not Python: {error}") from None
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef) and _fills(node)}
    if not functions:
        raise UserError(f"{name}: no function that fills a configuration, `config.key = value`")
    if function is None and len(functions) > 1:
        raise UserError(
            f"{name}: it has several configurations; name one as {name}:FUNCTION, of {', '.join(functions)}"
        )
    wanted = function or next(iter(functions))
    if wanted not in functions:
        raise UserError(f"{name}: there is no {wanted}; there are {', '.join(functions)}")
    values: Settings = {}
    _run(functions[wanted], functions, values, depth=8)
    return {key.removeprefix("config."): value for key, value in values.items() if key.startswith("config.")} | {
        key: value for key, value in values.items() if "." not in key and key != "config"
    }


def _fills(node: ast.FunctionDef) -> bool:
    return any(isinstance(line, ast.Assign) and _name(line.targets[0]).startswith("config.") for line in node.body)


def _run(node: ast.FunctionDef, functions: Mapping[str, ast.FunctionDef], values: Settings, depth: int) -> None:
    """Evaluates the assignments of a configuration function into `values`, without executing it; functions that it
    calls are followed `depth` levels deep."""
    for line in node.body:
        if not isinstance(line, ast.Assign) or not (name := _name(line.targets[0])):
            continue
        call = line.value
        base = functions.get(call.func.id) if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) else None
        if base is not None and depth:
            _run(base, functions, values, depth - 1)
        else:
            values[name] = _evaluated(call, values)


def _name(node: ast.expr) -> str:
    """Returns a.b.c of a name or an attribute; "" of anything else."""
    if isinstance(node, ast.Name):
        return node.id
    above = _name(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{above}.{node.attr}" if above and isinstance(node, ast.Attribute) else ""


def _evaluated(node: ast.expr, values: Settings) -> Any:
    try:
        return _worked_out(node, values)
    except (ValueError, TypeError, KeyError, ZeroDivisionError, OverflowError):
        return ast.unparse(node)


def _worked_out(node: ast.expr, values: Settings) -> Any:
    """Returns the value of an expression. Raises KeyError for a name or a form that is not known."""
    match node:
        case ast.Constant():
            return node.value
        case ast.Name() | ast.Attribute():
            return values[_name(node)]
        case ast.UnaryOp(op=ast.USub()):
            return -_worked_out(node.operand, values)
        case ast.BinOp():
            return _BINARY[type(node.op)](_worked_out(node.left, values), _worked_out(node.right, values))
        case ast.Compare(ops=[compared]):
            return _COMPARED[type(compared)](_worked_out(node.left, values), _worked_out(node.comparators[0], values))
        case ast.IfExp():
            return _worked_out(node.body if _worked_out(node.test, values) else node.orelse, values)
        case ast.List() | ast.Tuple():
            return [_worked_out(item, values) for item in node.elts]
        case ast.Dict():
            keys = [_worked_out(key, values) for key in node.keys if key is not None]
            return dict(zip(keys, (_worked_out(value, values) for value in node.values), strict=True))
        case ast.JoinedStr():
            return "".join(_piece(piece, values) for piece in node.values)
        case ast.Call():
            return _called(_name(node.func), node, values)
    raise KeyError(type(node).__name__)


def _piece(node: ast.expr, values: Settings) -> str:
    return str(_worked_out(node.value if isinstance(node, ast.FormattedValue) else node, values))


def _called(name: str, node: ast.Call, values: Settings) -> Any:
    """Evaluates a call of a configuration file: numbers, os.path.join and os.getcwd. Raises KeyError for any other
    function."""
    if name == "os.getcwd":
        return ""
    arguments = [_worked_out(argument, values) for argument in node.args]
    if name in NUMERIC:
        return NUMERIC[name](*arguments)
    if name == "os.path.join":
        return "/".join(str(part).strip("/") for part in arguments if part)
    raise KeyError(name)

"""Reads configurations of other libraries: YAML, JSON, the arguments in a shell script, or a Python function that
assigns to an ml_collections `config` (flow_grpo). Python files are parsed, never executed."""

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
_ASSIGNMENT = re.compile(r"^\s*(?:export\s+)?([A-Za-z_]\w*)=(\"[^\"]*\"|'[^']*'|\S*)\s*(?:#.*)?$", re.MULTILINE)
_OVERRIDE = re.compile(r"^\+{0,2}([A-Za-z_][\w.]*)=(.*)$", re.DOTALL)
NUMERIC: dict[str, Callable[..., Any]] = {"int": int, "float": float, "max": max, "min": min, "round": round}
_REFERENCE = re.compile(r"^\$\{([\w.]+)\}$")


def read_settings(path: Path) -> Settings:
    """Returns the settings in a file by dotted keys.

    path: a YAML, JSON or Python file, or FILE.py:FUNCTION; any other suffix is read as a shell script. Raises UserError
    if the file cannot be read or has no settings.
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
    """Returns the settings in a YAML or JSON text by dotted keys. A value ${section.key} becomes the value of that key,
    if it is set. Raises UserError if the text is not valid or not a mapping."""
    try:
        tree = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path}: not valid {path.suffix[1:].upper()}: {' '.join(str(error).split())}") from None
    if not isinstance(tree, Mapping):
        raise UserError(f"{path}: expected a mapping at the top level, not {type(tree).__name__}")
    settings = {key: number(value) for key, value in flatten(tree).items()}
    return {key: _resolved(value, settings) for key, value in settings.items()}


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Settings:
    """Flattens nested mappings: {"a": {"b": 1}} becomes {"a.b": 1}. Lists and empty mappings are values.

    prefix: the text that every key begins with, such as "a.".
    """
    flattened: Settings = {}
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            flattened |= flatten(value, f"{prefix}{name}.")
        else:
            flattened[f"{prefix}{name}"] = value
    return flattened


def _resolved(value: Any, settings: Settings, depth: int = 8) -> Any:
    """Returns the value of the key that `${key}` refers to, following up to `depth` references; any other value, or a
    reference to a key that is not set, unchanged."""
    match = _REFERENCE.match(value) if isinstance(value, str) else None
    if match is None or match[1] not in settings or not depth:
        return value
    return _resolved(settings[match[1]], settings, depth - 1)


def number(value: Any) -> Any:
    """Converts a string such as "5e-6", which YAML does not read as a number, to a float. Returns other values
    unchanged."""
    try:
        return float(value) if isinstance(value, str) and re.match(r"^[-+]?[\d.]+e[-+]?\d+$", value) else value
    except ValueError:
        return value


# --- shell scripts ---


def shell_settings(text: str, folder: Path) -> Settings:
    """Returns the arguments of a shell script by name: those of its command with the most arguments, which may be
    written as KEY=VALUE, --key VALUE ... or --key=VALUE.

    Variables that the script sets are filled in; others stay as $NAME. The arguments override the settings in the file
    that an argument config=FILE names, if it exists. folder: where the script lies.
    """
    joined = re.sub(r"\\\s*\n", " ", text)
    lines = [line for line in joined.splitlines() if not line.lstrip().startswith("#")]
    variables = {name: value.strip("\"'") for name, value in _ASSIGNMENT.findall("\n".join(lines))}
    # filled in twice, since a variable may contain another one
    commands = [_arguments(_fill_variables(_fill_variables(line, variables), variables)) for line in lines]
    settings = max(commands, key=len, default={})
    config_file = settings.pop("config", None)
    base = _base_file(config_file, folder) if isinstance(config_file, str) else None
    if config_file is not None and base is None:
        settings["config"] = config_file
    return ({} if base is None else read_settings(base)) | settings


def _base_file(name: str, folder: Path) -> Path | None:
    """Returns the path of the file `name` below `folder`, or below the nearest parent folder that has it; None if none
    has."""
    folders = (folder, *folder.resolve().parents)
    return next((parent / name for parent in folders if (parent / name).is_file()), None)


def _fill_variables(text: str, variables: Mapping[str, str]) -> str:
    """Replaces $NAME, ${NAME} and ${NAME:-default} by the variable's value, else by the default; without either the
    text stays."""
    return _VARIABLE.sub(lambda match: variables.get(match[1], match[2] or match[0]), text)


def _arguments(line: str) -> Settings:
    """Returns the arguments of one command line by name; none for a line that only sets variables.

    An environment variable NPROC_PER_NODE before the command becomes `num_processes`.
    """
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        return {}
    command_start = next((i for i, word in enumerate(words) if not re.match(r"^[A-Za-z_]\w*=", word)), len(words))
    if command_start < len(words) and words[command_start] in ("export", "set", "echo"):
        return {}
    environment = dict(word.split("=", 1) for word in words[:command_start])
    settings: Settings = {}
    flag: str | None = None
    for word in words[command_start + 1 :]:
        override = _OVERRIDE.match(word)
        if word.startswith("--"):
            flag, equals, value = word[2:].partition("=")
            settings[flag] = _value(value) if equals else True
            flag = None if equals else flag
        elif word.startswith("-") or (word.endswith(".py") and flag is not None and settings[flag] is not True):
            flag = None  # an option of the interpreter, or the script whose own flags follow
        elif flag is not None:
            settings[flag] = _append(settings[flag], _value(word))
        elif override is not None:
            settings[override[1]] = _value(override[2])
    if settings and "NPROC_PER_NODE" in environment:
        settings.setdefault("num_processes", _value(environment["NPROC_PER_NODE"]))
    return settings


def _append(previous: Any, value: Any) -> Any:
    """Returns the value of a flag after one more word. previous: True if no word followed the flag
    yet, else one value or a list."""
    if previous is True:
        return value
    return [*(previous if isinstance(previous, list) else [previous]), value]


def _value(word: str) -> Any:
    """Parses a word of the command line as YAML, or as Python's True, False or None."""
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
    """Returns what a function of a Python file assigns to keys of `config` and to variables, without executing it.

    Literals, arithmetic, earlier variables, int(), f-strings, os.path.join and calls of the file's other configuration
    functions are evaluated. Any other expression is returned as its source text.

    text: the source code. function: its name, or None if there is only one. name: the file, for messages. Raises
    UserError if there is no such function, or there are several and `function` is None.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise UserError(f"{name}: not valid Python: {error}") from None
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef) and _assigns_config(node)}
    if not functions:
        raise UserError(
            f"{name}: no function sets keys of a configuration (config.KEY = VALUE), so this is not a configuration of "
            "flow_grpo; name a file with such functions"
        )
    if function is None and len(functions) > 1:
        raise UserError(
            f"{name} has several configurations; name one as {name}:FUNCTION, where FUNCTION is one of "
            f"{', '.join(functions)}"
        )
    selected = function or next(iter(functions))
    if selected not in functions:
        raise UserError(f"{name} has no function {selected}; choose one of {', '.join(functions)}")
    values: Settings = {}
    _run(functions[selected], functions, values, depth=8)
    variables = {key: value for key, value in values.items() if "." not in key and key != "config"}
    prefix = "config."
    return {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)} | variables


def _assigns_config(node: ast.FunctionDef) -> bool:
    """Returns whether a statement of the function assigns to `config.KEY`."""
    return any(isinstance(line, ast.Assign) and _name(line.targets[0]).startswith("config.") for line in node.body)


def _run(node: ast.FunctionDef, functions: Mapping[str, ast.FunctionDef], values: Settings, depth: int) -> None:
    """Evaluates the assignments in a configuration function into `values`, by dotted name.

    A call of another function of the file is evaluated in the same way, up to `depth` levels deep.
    """
    for line in node.body:
        if not isinstance(line, ast.Assign) or not (name := _name(line.targets[0])):
            continue
        call = line.value
        base = functions.get(call.func.id) if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) else None
        if base is not None and depth:
            _run(base, functions, values, depth - 1)
        else:
            values[name] = _value_or_source(call, values)


def _name(node: ast.expr) -> str:
    """Returns the dotted name "a.b.c" of a name or attribute; "" for any other expression."""
    if isinstance(node, ast.Name):
        return node.id
    prefix = _name(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{prefix}.{node.attr}" if prefix and isinstance(node, ast.Attribute) else ""


def _value_or_source(node: ast.expr, values: Settings) -> Any:
    """Returns the value of an expression, or its source text if it cannot be evaluated."""
    try:
        return _evaluate(node, values)
    except (ValueError, TypeError, KeyError, ZeroDivisionError, OverflowError):
        return ast.unparse(node)


def _evaluate(node: ast.expr, values: Settings) -> Any:
    """Evaluates an expression. Raises KeyError for an unknown name or an unsupported type of expression.

    values: variables and attributes that were assigned before, by dotted name.
    """
    match node:
        case ast.Constant():
            return node.value
        case ast.Name() | ast.Attribute():
            return values[_name(node)]
        case ast.UnaryOp(op=ast.USub()):
            return -_evaluate(node.operand, values)
        case ast.BinOp():
            return _BINARY[type(node.op)](_evaluate(node.left, values), _evaluate(node.right, values))
        case ast.Compare(ops=[compared]):
            return _COMPARED[type(compared)](_evaluate(node.left, values), _evaluate(node.comparators[0], values))
        case ast.IfExp():
            return _evaluate(node.body if _evaluate(node.test, values) else node.orelse, values)
        case ast.List() | ast.Tuple():
            return [_evaluate(item, values) for item in node.elts]
        case ast.Dict():
            keys = [_evaluate(key, values) for key in node.keys if key is not None]
            return dict(zip(keys, (_evaluate(value, values) for value in node.values), strict=True))
        case ast.JoinedStr():
            return "".join(_piece(piece, values) for piece in node.values)
        case ast.Call():
            return _call(_name(node.func), node, values)
    raise KeyError(type(node).__name__)


def _piece(node: ast.expr, values: Settings) -> str:
    """Returns the text of one part of an f-string: a literal or a replacement field."""
    return str(_evaluate(node.value if isinstance(node, ast.FormattedValue) else node, values))


def _call(name: str, node: ast.Call, values: Settings) -> Any:
    """Evaluates a call of a function in NUMERIC, os.path.join or os.getcwd (""). Raises KeyError for any other one."""
    if name == "os.getcwd":
        return ""
    arguments = [_evaluate(argument, values) for argument in node.args]
    if name in NUMERIC:
        return NUMERIC[name](*arguments)
    if name == "os.path.join":
        return "/".join(str(part).strip("/") for part in arguments if part)
    raise KeyError(name)

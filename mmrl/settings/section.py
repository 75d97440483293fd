"""Sections of a configuration, their construction from mappings, and their conversion to mappings.

Every package keeps its settings beside the code that they set. A section that comes in kinds is a `Choice`: its `type`
selects the kind, and only the options of that kind exist. Neither this module nor modules of settings import torch, so
that reading a configuration is fast.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar, Union

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from mmrl import moved
from mmrl.errors import describe_error

Model = TypeVar("Model", bound="Section")
Kind = TypeVar("Kind", bound="Choice")
NOTHING: tuple[Any, ...] = (None, {}, [], ())
Path_ = tuple[str, ...]  # keys from the root of a configuration


class SettingsError(ValueError):
    """An error in one line that names the key at fault and valid values."""


class Section(BaseModel):
    """A part of a configuration. It is immutable, rejects undeclared keys, and rejects numbers that are not finite
    unless the key allows them."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Choice(Section):
    """A section that comes in kinds.

    `kinds` maps names of shipped kinds to "package.module:Class". A user's class is selected by such a string and
    inherits from the same base. The other class variables are for `mmrl methods`.
    """

    type: str
    kinds: ClassVar[dict[str, str]] = {}
    title: ClassVar[str] = ""  # a noun for messages, such as "surrogate"
    equation: ClassVar[str] = ""
    source: ClassVar[str] = ""  # the paper an equation comes from
    test: ClassVar[str] = ""  # a test of it
    compared: ClassVar[str] = ""  # public code whose numbers it gives, as REPOSITORY@COMMIT; empty: not compared
    of_numbers: ClassVar[bool] = False  # whether a number alone stands for the kind `constant` with this `number`

    @property
    def key(self) -> str:
        """A key for state that belongs to this choice; equal for equal settings."""
        return f"{self.type} {self.model_dump_json()}"

    @classmethod
    def expand(cls, value: object) -> Any:
        """Returns the mapping for a short form of this choice: a name alone is a kind with its defaults."""
        if cls.of_numbers and isinstance(value, int | float) and not isinstance(value, bool):
            return {"type": "constant", "number": value}
        return {"type": value} if isinstance(value, str) else value

    @classmethod
    def shorten(cls, value: Choice) -> float | str | None:
        """Returns the short form of `value` if it has one, else None."""
        if cls.of_numbers and value.type == "constant":
            return vars(value)["number"]
        return value.type if list(type(value).model_fields) == ["type"] else None


def option(
    default: Any = ...,
    description: str = "",
    *,
    unit: str | None = None,
    kinds: dict[str, str] | None = None,
    **constraints: Any,
) -> Any:
    """Declares a key of a section: its default (none: it is required), meaning, unit, and pydantic's constraints.

    kinds: of a choice, where this key allows other kinds than its class.
    """
    extra: dict[str, Any] = {n: value for n, value in {"unit": unit, "kinds": kinds}.items() if value is not None}
    return Field(default, description=description, json_schema_extra=extra, **constraints)


# --- from a mapping to a section ---


def make(model: type[Model], tree: object, path: Path_ = ()) -> Model:
    """Builds the section `model` from `tree`. Raises SettingsError naming the key at fault by its whole path."""
    if isinstance(tree, model):
        return tree
    if not isinstance(tree, Mapping):
        raise SettingsError(f"{dotted(path)}: expected a mapping of {', '.join(keys_of(model))} (got {tree!r})")
    for key in tree:
        if key not in model.model_fields:
            raise SettingsError(unknown(key, model, path))
    values = {}
    for name, field in model.model_fields.items():
        if name in tree and not (tree[name] is None and not _takes_none(field.annotation)):
            value = _of_default_kind(field, tree[name])
            values[name] = resolve(field.annotation, value, (*path, name), _kinds_of(field))
            _check_bounds(field, values[name], (*path, name))
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = dotted((*path, *(str(part) for part in first["loc"])))
        got = "" if first["type"] in ("missing", "value_error") else f" (got {first['input']!r})"
        message = f"{first['msg'].removeprefix('Value error, ')}{got}"
        raise SettingsError(f"{where}: {message}" if where else message) from None


def resolve(annotation: Any, value: object, path: Path_, kinds: Mapping[str, str] | None = None) -> Any:
    """Returns `value` with mappings replaced by the sections that `annotation` declares. Raises SettingsError."""
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        if issubclass(annotation, Choice):
            return choose(annotation, value, path, kinds)
        return make(annotation, value, path) if issubclass(annotation, Section) else value
    arguments = typing.get_args(annotation)
    origin = typing.get_origin(annotation)
    if origin in (Union, types.UnionType):
        sections = [a for a in arguments if _holds_sections(a)]
        return value if value is None or not sections else resolve(sections[0], value, path, kinds)
    if origin in (list, tuple) and arguments and _holds_sections(arguments[0]):
        if not isinstance(value, list | tuple):
            raise SettingsError(f"{dotted(path)}: expected a list (got {value!r})")
        return [resolve(arguments[0], item, (*path, str(i)), kinds) for i, item in enumerate(value)]
    if origin is dict and _holds_sections(arguments[1]):
        if not isinstance(value, Mapping):
            raise SettingsError(f"{dotted(path)}: expected a mapping (got {value!r})")
        return {key: resolve(arguments[1], item, (*path, str(key)), kinds) for key, item in value.items()}
    return value


def choose(base: type[Kind], value: object, path: Path_ = (), kinds: Mapping[str, str] | None = None) -> Kind:
    """Builds the kind of `base` that `value` selects, with its options. Raises SettingsError."""
    if isinstance(value, base):
        return value
    tree = base.expand(value)
    return make(kind_of(base, tree, path, kinds), tree, path)


def kind_of(base: type[Kind], tree: object, path: Path_ = (), kinds: Mapping[str, str] | None = None) -> type[Kind]:
    """Returns the class of the kind that `tree` selects, shipped or the user's. Raises SettingsError."""
    tree, kinds = base.expand(tree), base.kinds if kinds is None else kinds
    if not isinstance(tree, Mapping):
        raise SettingsError(f"{dotted(path)}: expected {one_of(kinds)} (got {tree!r})")
    default = base.model_fields["type"].default
    name = tree.get("type") or (default if isinstance(default, str) else None)
    where = dotted((*path, "type"))
    if now := rewritten(base, tree):
        raise SettingsError(_form_message(where, tree, now))
    if name is None:
        raise SettingsError(f"{where} is missing; it is {one_of(kinds)}")
    if name in kinds:
        return locate(kinds[name], where)
    if not isinstance(name, str) or ":" not in name:
        raise SettingsError(f"{where}={name} is unknown{nearest(str(name), kinds)}; use {one_of(kinds)}")
    kind = locate(name, where)
    if not (isinstance(kind, type) and issubclass(kind, base)):
        raise SettingsError(f"{where}={name} does not inherit from {base.__module__}:{base.__name__}")
    if inspect.isabstract(kind):
        lacks = ", ".join(sorted(kind.__abstractmethods__))
        raise SettingsError(f"{where}={name} lacks {lacks}, which {base.__module__}:{base.__name__} asks for")
    return kind


def rewritten(base: type[Choice], value: object) -> list[dict[str, Any]]:
    """Returns the present form of a choice in a former form: one mapping, or several that together do the same. Empty
    where it is in its present form."""
    tree = base.expand(value)
    return moved.present_forms(base.title, tree) if isinstance(tree, Mapping) else []


def _form_message(where: str, tree: Mapping[str, Any], now: list[dict[str, Any]]) -> str:
    """Returns the error message for a choice in a former form; unchanged keys are left out."""
    gone = [key for key in tree if key not in now[0]]
    changed = [{k: v for k, v in each.items() if k == "type" or k not in tree or tree[k] != v} for each in now]
    return (
        f"{where}={tree['type']}{' with ' if gone else ''}{', '.join(gone)} is "
        f"{' and '.join(map(as_yaml, changed))} now; mmrl convert writes it"
    )


def as_yaml(value: object) -> str:
    """Returns a value as YAML in one line, as in an override."""
    import yaml

    return yaml.safe_dump([value], default_flow_style=True, sort_keys=False, width=math.inf).strip()[1:-1]


def locate(target: str, key: str) -> Any:
    """Returns the object at "package.module:name". Raises SettingsError naming the configuration's key."""
    module, _, name = target.partition(":")
    try:
        members = vars(importlib.import_module(module))
    except (ImportError, ValueError) as error:
        why = f"{error}{moved.hint_of(error) if isinstance(error, ImportError) else ''}"
        raise SettingsError(f"{key}={target}: no such object ({why}); expected package.module:name") from None
    except Exception as error:  # any fault of the user's module
        raise SettingsError(f"{key}={target}: {module} can not be imported: {describe_error(error)}") from None
    if name not in members:
        why = f"{module} has no {name}{moved.hint(target)}"
        raise SettingsError(f"{key}={target}: no such object ({why}); expected package.module:name")
    return members[name]


def load_attribute(target: str) -> Any:
    """Returns the object of this package at "package.module:name". So settings name the code that they configure
    without importing it, which imports the settings in turn."""
    module, _, name = target.partition(":")
    return vars(importlib.import_module(module))[name]


def with_types(model: type[Section], tree: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `tree` with the default `type` of every choice in it written out.

    Raises SettingsError for an unknown kind.
    """
    expanded = dict(tree)
    for name, kind, value in _inner(model, tree):
        expanded[name] = with_types(kind, value)
    return expanded


def without_keys(
    model: type[Section], tree: Mapping[str, Any], drop: Callable[[Path_], bool], path: Path_ = ()
) -> dict[str, Any]:
    """Returns `tree` without the null keys that `model` does not have and for which `drop` is true, in the sections
    below too. Raises SettingsError for an unknown kind."""
    field_names = set(model.model_fields)
    remaining = {n: v for n, v in tree.items() if v is not None or n in field_names or not drop((*path, n))}
    for name, kind, value in _inner(model, remaining):
        remaining[name] = without_keys(kind, value, drop, (*path, name))
    return remaining


def has_key(model: type[Section], tree: Mapping[str, Any], path: Path_) -> bool:
    """Returns whether the sections of `tree` have the key at `path`."""
    if len(path) == 1:
        return path[0] in model.model_fields
    return any(has_key(kind, value, path[1:]) for name, kind, value in _inner(model, tree, path[0]) if name == path[0])


def _inner(
    model: type[Section], tree: Mapping[str, Any], also: str | None = None
) -> Iterable[tuple[str, type[Section], dict[str, Any]]]:
    """Yields the sections in `tree` whose keys have a section by default: key, class, and mapping with its `type`.
    also: a key to yield with its default even where the tree lacks it."""
    for name, field in model.model_fields.items():
        value = tree.get(name) or {} if name == also else tree.get(name)
        if isinstance(field.default, Choice):
            value = field.default.expand(value) if isinstance(value, str) else value
        if isinstance(value, Mapping) and isinstance(field.default, Section):
            value = _of_default_kind(field, value)
            kind = type(field.default)
            if isinstance(field.default, Choice):
                kind = kind_of(field.annotation, value, (name,), _kinds_of(field))  # type: ignore[arg-type]
            yield name, kind, value


# --- from a section to a mapping ---


def plain(value: object, *, brief: bool = False) -> Any:
    """Converts `value` to mappings, lists, strings and numbers, from which `make` builds the same section. brief:
    without the keys that hold nothing by default."""
    if isinstance(value, Choice) and (short := value.shorten(value)) is not None:
        return short
    if isinstance(value, Section):
        held = {name: vars(value)[name] for name in type(value).model_fields}
        if brief:
            held = {n: v for n, v in held.items() if v not in NOTHING or v != type(value).model_fields[n].default}
        return {name: plain(item, brief=brief) for name, item in held.items()}
    if isinstance(value, Mapping):
        return {str(key): plain(item, brief=brief) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, brief=brief) for item in value]
    return str(value) if isinstance(value, Path) else value


def sections_in(value: object, base: type, path: Path_ = ()) -> Iterable[tuple[str, Any]]:
    """Yields every `base`, a kind of section or of value, inside a section, with its dotted path."""
    if isinstance(value, base):
        yield dotted(path), value
    elif isinstance(value, Section):
        for name in type(value).model_fields:
            yield from sections_in(vars(value)[name], base, (*path, name))
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from sections_in(item, base, (*path, str(i)))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from sections_in(item, base, (*path, str(key)))


# --- parts of messages ---


def keys_of(model: type[Section]) -> list[str]:
    return list(model.model_fields)


def unknown(key: object, model: type[Section], path: Path_) -> str:
    """Returns the message for an unknown key: it names the present key, the nearest one, or all."""
    valid = keys_of(model)
    if (now := moved.present_key(str(key))) in valid:
        return f"unknown key {dotted((*path, str(key)))}; it is {now} now; mmrl convert writes it"
    if (theirs := their_key(str(key))) is not None:
        library, ours = theirs
        return f"unknown key {dotted((*path, str(key)))}; {key} of {library} is {ours} here"
    near = difflib.get_close_matches(str(key), valid, n=1, cutoff=0.5)
    hint = f"did you mean {dotted((*path, near[0]))}?" if near else f"valid keys: {', '.join(valid)}"
    return f"unknown key {dotted((*path, str(key)))}; {hint}"


def their_key(name: str) -> tuple[str, str] | None:
    """Returns the library that has a key of this name, and what it is here; None for a name that none of them has."""
    import json  # here, as the table: only a message asks for them

    table = json.loads(Path(__file__).with_name("external_keys.json").read_text())
    return (table[name][0], table[name][1]) if name in table else None


def nearest(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(names), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def one_of(kinds: Iterable[str]) -> str:
    return f"one of {', '.join(kinds)}, or package.module:Class"


def dotted(path: Path_) -> str:
    return ".".join(path)


def _kinds_of(field: FieldInfo) -> Mapping[str, str] | None:
    extra = field.json_schema_extra
    kinds = extra.get("kinds") if isinstance(extra, dict) else None
    return kinds if isinstance(kinds, dict) else None  # type: ignore[return-value]


def _of_default_kind(field: FieldInfo, value: object) -> Any:
    """Returns `value` with the default `type` of the key, if it is a choice without one."""
    if isinstance(field.default, Choice) and isinstance(value, Mapping) and "type" not in value:
        return {"type": field.default.type, **value}
    return value


def _takes_none(annotation: object) -> bool:
    return annotation is Any or type(None) in typing.get_args(annotation)


def _holds_sections(annotation: object) -> bool:
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return issubclass(annotation, Section)
    return any(_holds_sections(argument) for argument in typing.get_args(annotation))


def _check_bounds(field: FieldInfo, value: object, path: Path_) -> None:
    """Checks the bounds of a number that may change during a run; see `mmrl.schedules.schedule.number`."""
    extra = field.json_schema_extra
    if isinstance(value, Choice) and isinstance(extra, dict) and isinstance(bounds := extra.get("bounds"), dict):
        try:
            value.check(**bounds)  # type: ignore[attr-defined]
        except ValueError as error:
            raise SettingsError(f"{dotted(path)}: {error}") from None

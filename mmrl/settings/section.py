"""Sections of a configuration: what they are, how a mapping becomes one, and how one becomes a mapping again.

Every room keeps its own settings beside the code that they set. A thing that comes in kinds is a `Choice`: its `type`
says which kind it is, and only the options of that kind exist. Nothing in this module, and nothing that holds settings,
imports torch: reading a configuration has to be quick.
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
from mmrl.errors import told

Model = TypeVar("Model", bound="Section")
Kind = TypeVar("Kind", bound="Choice")
NOTHING: tuple[Any, ...] = (None, {}, [], ())
Path_ = tuple[str, ...]  # the keys that lead to a place in a configuration


class SettingsError(ValueError):
    """One line that names the key at fault and what would fit."""


class Section(BaseModel):
    """A part of a configuration. It can not be changed once it is made, has no key that it does not declare, and no
    number that is not finite, unless the key allows it."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Choice(Section):
    """A section that comes in kinds.

    `kinds` maps the names of the shipped kinds to where their classes are; a class of one's own is named as
    `package.module:Class` and inherits from the same base. The other class variables are for `mmrl methods`.
    """

    type: str
    kinds: ClassVar[dict[str, str]] = {}
    title: ClassVar[str] = ""  # what the kinds are, for messages: "surrogate"
    equation: ClassVar[str] = ""
    source: ClassVar[str] = ""  # the paper an equation comes from
    test: ClassVar[str] = ""  # the test that pins it
    of_numbers: ClassVar[bool] = False  # whether a number alone stands for the kind `constant` with this `number`

    @property
    def key(self) -> str:
        """By which what is known for this choice is found again; equal for equal settings."""
        return f"{self.type} {self.model_dump_json()}"

    @classmethod
    def expand(cls, value: Any) -> Any:
        """The mapping that a shorter way to write this choice stands for: a name alone is a kind with its defaults."""
        if cls.of_numbers and isinstance(value, int | float) and not isinstance(value, bool):
            return {"type": "constant", "number": value}
        return {"type": value} if isinstance(value, str) else value

    @classmethod
    def shorten(cls, value: Choice) -> Any:
        """The shorter way to write `value`, where there is one that says the same; else None."""
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
    """A key of a section: its default (none: it must be given), what it means, its unit, and pydantic's constraints.

    kinds: of a choice, where this key allows other kinds than its class names.
    """
    extra: dict[str, Any] = {n: value for n, value in {"unit": unit, "kinds": kinds}.items() if value is not None}
    return Field(default, description=description, json_schema_extra=extra, **constraints)


# --- from a mapping to a section ---


def make(model: type[Model], tree: Any, path: Path_ = ()) -> Model:
    """`tree` as a `model`. Raises SettingsError naming the key at fault, by its whole path."""
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
        given = "" if first["type"] in ("missing", "value_error") else f" (got {first['input']!r})"
        message = f"{first['msg'].removeprefix('Value error, ')}{given}"
        raise SettingsError(f"{where}: {message}" if where else message) from None


def resolve(annotation: Any, value: Any, path: Path_, kinds: Mapping[str, str] | None = None) -> Any:
    """`value` with every mapping that stands for a section made into that section."""
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


def choose(base: type[Kind], value: Any, path: Path_ = (), kinds: Mapping[str, str] | None = None) -> Kind:
    """The kind of `base` that `value` names, made with its options. Raises SettingsError."""
    if isinstance(value, base):
        return value
    tree = base.expand(value)
    return make(kind_of(base, tree, path, kinds), tree, path)


def kind_of(base: type[Kind], tree: Any, path: Path_ = (), kinds: Mapping[str, str] | None = None) -> type[Kind]:
    """The class of the kind that `tree` names, which may be one of the user's own. Raises SettingsError."""
    tree, kinds = base.expand(tree), base.kinds if kinds is None else kinds
    if not isinstance(tree, Mapping):
        raise SettingsError(f"{dotted(path)}: expected {one_of(kinds)} (got {tree!r})")
    default = base.model_fields["type"].default
    name = tree.get("type") or (default if isinstance(default, str) else None)
    where = dotted((*path, "type"))
    if now := rewritten(base, tree):
        raise SettingsError(_told_form(where, tree, now))
    if name is None:
        raise SettingsError(f"{where} is missing; it is {one_of(kinds)}")
    if name in kinds:
        return locate(kinds[name], where)
    if not isinstance(name, str) or ":" not in name:
        raise SettingsError(f"{where}={name} is unknown{nearest(str(name), kinds)}; use {one_of(kinds)}")
    own = locate(name, where)
    if not (isinstance(own, type) and issubclass(own, base)):
        raise SettingsError(f"{where}={name} does not inherit from {base.__module__}:{base.__name__}")
    if inspect.isabstract(own):
        lacks = ", ".join(sorted(own.__abstractmethods__))
        raise SettingsError(f"{where}={name} lacks {lacks}, which {base.__module__}:{base.__name__} asks for")
    return own


def rewritten(base: type[Choice], value: Any) -> list[dict[str, Any]]:
    """Returns what a choice in its former form is today: one mapping, or several that together do the same; none where
    it is in its present form."""
    tree = base.expand(value)
    return moved.present_forms(base.title, tree) if isinstance(tree, Mapping) else []


def _told_form(where: str, tree: Mapping[str, Any], now: list[dict[str, Any]]) -> str:
    """One line; keys that stay as they are it leaves out."""
    gone = [key for key in tree if key not in now[0]]
    changed = [{k: v for k, v in each.items() if k == "type" or k not in tree or tree[k] != v} for each in now]
    return (
        f"{where}={tree['type']}{' with ' if gone else ''}{', '.join(gone)} is "
        f"{' and '.join(map(as_yaml, changed))} now; mmrl convert writes it"
    )


def as_yaml(value: Any) -> str:
    """Returns a value as YAML in one line, as in an override."""
    import yaml

    return yaml.safe_dump([value], default_flow_style=True, sort_keys=False, width=math.inf).strip()[1:-1]


def locate(target: str, key: str) -> Any:
    """What "package.module:name" names. Raises SettingsError naming the configuration's key."""
    module, _, name = target.partition(":")
    try:
        members = vars(importlib.import_module(module))
    except (ImportError, ValueError) as error:
        why = f"{error}{moved.hint_of(error) if isinstance(error, ImportError) else ''}"
        raise SettingsError(f"{key}={target}: no such object ({why}); expected package.module:name") from None
    except Exception as error:  # any fault of a module of the user's own
        raise SettingsError(f"{key}={target}: {module} can not be imported: {told(error)}") from None
    if name not in members:
        why = f"{module} has no {name}{moved.hint(target)}"
        raise SettingsError(f"{key}={target}: no such object ({why}); expected package.module:name")
    return members[name]


def load_attribute(target: str) -> Any:
    """Returns the object of this package at "package.module:name". With it a room's settings name what is made of them
    without an import of the room, which needs its settings in turn."""
    module, _, name = target.partition(":")
    return vars(importlib.import_module(module))[name]


def with_types(model: type[Section], tree: Mapping[str, Any]) -> dict[str, Any]:
    """`tree` with the `type` of every choice in it written out, where the key has a kind by default.

    Raises SettingsError for a kind that does not exist.
    """
    found = dict(tree)
    for name, kind, value in _inner(model, tree):
        found[name] = with_types(kind, value)
    return found


def without_keys(
    model: type[Section], tree: Mapping[str, Any], drop: Callable[[Path_], bool], path: Path_ = ()
) -> dict[str, Any]:
    """`tree` without the keys that are null, that `model` does not have, and that `drop` says may go; so for every
    section in it that its key has by default. Raises SettingsError for a kind that does not exist."""
    known = set(model.model_fields)
    found = {n: v for n, v in tree.items() if v is not None or n in known or not drop((*path, n))}
    for name, kind, value in _inner(model, found):
        found[name] = without_keys(kind, value, drop, (*path, name))
    return found


def has_key(model: type[Section], tree: Mapping[str, Any], path: Path_) -> bool:
    """Whether the sections that `tree` stands for have the key that `path` leads to."""
    if len(path) == 1:
        return path[0] in model.model_fields
    return any(has_key(kind, value, path[1:]) for name, kind, value in _inner(model, tree, path[0]) if name == path[0])


def _inner(
    model: type[Section], tree: Mapping[str, Any], also: str | None = None
) -> Iterable[tuple[str, type[Section], dict[str, Any]]]:
    """The sections in `tree` that their keys have by default: key, kind, and mapping with its `type`; `also` with what
    it is by default where the tree does not have it."""
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


def plain(value: Any, *, brief: bool = False) -> Any:
    """`value` as mappings, lists, strings and numbers, from which `make` makes the same section again. brief: without
    the keys that hold nothing."""
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


def choices_in(value: Any, base: type[Choice], path: Path_ = ()) -> Iterable[tuple[str, Any]]:
    """Every `base` inside a section, with its dotted path."""
    if isinstance(value, base):
        yield dotted(path), value
    elif isinstance(value, Section):
        for name in type(value).model_fields:
            yield from choices_in(vars(value)[name], base, (*path, name))
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from choices_in(item, base, (*path, str(i)))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from choices_in(item, base, (*path, str(key)))


# --- words for messages ---


def keys_of(model: type[Section]) -> list[str]:
    return list(model.model_fields)


def unknown(key: Any, model: type[Section], path: Path_) -> str:
    """Returns what to say of a key that `model` does not have: its present name, the nearest one, else all."""
    valid = keys_of(model)
    if (now := moved.present_key(str(key))) in valid:
        return f"unknown key {dotted((*path, str(key)))}; it is {now} now; mmrl convert writes it"
    near = difflib.get_close_matches(str(key), valid, n=1, cutoff=0.5)
    hint = f"did you mean {dotted((*path, near[0]))}?" if near else f"valid keys: {', '.join(valid)}"
    return f"unknown key {dotted((*path, str(key)))}; {hint}"


def nearest(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def one_of(kinds: Iterable[str]) -> str:
    return f"one of {', '.join(kinds)}, or package.module:Class"


def dotted(path: Path_) -> str:
    return ".".join(path)


def _kinds_of(field: FieldInfo) -> Mapping[str, str] | None:
    extra = field.json_schema_extra
    kinds = extra.get("kinds") if isinstance(extra, dict) else None
    return kinds if isinstance(kinds, dict) else None  # type: ignore[return-value]


def _of_default_kind(field: FieldInfo, value: Any) -> Any:
    """Options without a `type` are those of the kind that the key has by default."""
    if isinstance(field.default, Choice) and isinstance(value, Mapping) and "type" not in value:
        return {"type": field.default.type, **value}
    return value


def _takes_none(annotation: Any) -> bool:
    return annotation is Any or type(None) in typing.get_args(annotation)


def _holds_sections(annotation: Any) -> bool:
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return issubclass(annotation, Section)
    return any(_holds_sections(argument) for argument in typing.get_args(annotation))


def _check_bounds(field: FieldInfo, value: Any, path: Path_) -> None:
    """Bounds of a number that may change while a run goes on; see `mmrl.schedules.schedule.number`."""
    extra = field.json_schema_extra
    if isinstance(value, Choice) and isinstance(extra, dict) and isinstance(bounds := extra.get("bounds"), dict):
        try:
            value.check(**bounds)  # type: ignore[attr-defined]
        except ValueError as error:
            raise SettingsError(f"{dotted(path)}: {error}") from None

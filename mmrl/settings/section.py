"""Sections of a configuration: declared as classes, built from mappings, and converted back to mappings.

Every package keeps its settings beside the code that they configure. A section that has variants is a `Choice`: its key
`type` selects the class, and only the options of that class exist. Neither this module nor modules of settings import
torch, so that reading a configuration is fast.
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

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from mmrl import moved
from mmrl.errors import describe_error
from mmrl.runtime.installation import extra_command, extra_with

Model = TypeVar("Model", bound="Section")
Kind = TypeVar("Kind", bound="Choice")
NOTHING: tuple[Any, ...] = (None, {}, [], ())  # empty values of a key
Path_ = tuple[str, ...]  # keys from the root of a configuration


class SettingsError(ValueError):
    """An error in a configuration: one line that names the wrong key and its valid values."""


class Section(BaseModel):
    """A part of a configuration. It is immutable, rejects undeclared keys, and rejects numbers that are not finite
    unless the key allows them."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Choice(Section):
    """A section whose key `type` selects the class that is built.

    `kinds` maps the registered values of `type` to "package.module:Class". A user selects a class of their own by such
    a string; it inherits from the same base. The other class variables are shown by `mmrl methods`.
    """

    type: str
    kinds: ClassVar[dict[str, str]] = {}
    title: ClassVar[str] = ""  # a noun for messages, such as "surrogate"
    equation: ClassVar[str] = ""
    source: ClassVar[str] = ""  # the paper an equation comes from
    test: ClassVar[str] = ""  # the test file that checks it
    of_numbers: ClassVar[bool] = False  # whether a plain number is short for {type: constant, number: ...}

    @model_validator(mode="before")
    @classmethod
    def _name_the_type(cls, values: Any) -> Any:
        """Sets `type` where an object is made in Python, as in `Entropy(coefficient=0.1)`: the class is known there."""
        if not isinstance(values, Mapping) or "type" in values or not cls.model_fields["type"].is_required():
            return values
        target = f"{cls.__module__}:{cls.__qualname__}"
        return {"type": next((name for name, kind in cls.kinds.items() if kind == target), target), **values}

    @property
    def key(self) -> str:
        """Returns the key under which the state of this choice is saved; equal settings have equal keys."""
        return f"{self.type} {self.model_dump_json()}"

    @classmethod
    def expand(cls, value: object) -> Any:
        """Returns the mapping that `value` is short for: a name stands for that type with its default options. Other
        values are returned unchanged."""
        if cls.of_numbers and isinstance(value, int | float) and not isinstance(value, bool):
            return {"type": "constant", "number": value}
        return {"type": value} if isinstance(value, str) else value

    @classmethod
    def shorten(cls, value: Choice) -> float | str | None:
        """Returns the short form of `value`: a number, or the name of a type that has no options. Returns None if it
        has no short form."""
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
    """Declares a key of a section.

    default: none means that the key is required. description: the meaning of the key. unit: such as "pixels". kinds:
    for a `Choice`, the types that this key allows, if they differ from those of its class. constraints: pydantic's,
    such as `ge`.
    """
    extra: dict[str, Any] = {name: value for name, value in {"unit": unit, "kinds": kinds}.items() if value is not None}
    return Field(default, description=description, json_schema_extra=extra, **constraints)


# --- from a mapping to a section ---


def make(model: type[Model], tree: object, path: Path_ = ()) -> Model:
    """Builds the section `model` from the mapping `tree`. path: the keys that lead to it, for messages. Raises
    SettingsError, which names the wrong key by its full path."""
    if isinstance(tree, model):
        return tree
    if not isinstance(tree, Mapping):
        raise SettingsError(f"{dotted(path)}: expected a mapping of {', '.join(keys_of(model))} (got {tree!r})")
    for key in tree:
        if key not in model.model_fields:
            raise SettingsError(unknown_key_message(key, model, path))
    values = {}
    for name, field in model.model_fields.items():
        # null stands for the default of a key that does not accept None
        if name in tree and not (tree[name] is None and not _accepts_none(field.annotation)):
            value = _with_default_type(field, tree[name])
            values[name] = resolve(field.annotation, value, (*path, name), _allowed_types(field))
            _check_bounds(field, values[name], (*path, name))
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = dotted((*path, *(str(part) for part in first["loc"])))
        got = "" if first["type"] in ("missing", "value_error") else f" (got {first['input']!r})"
        message = f"{first['msg'].removeprefix('Value error, ')}{got}"
        raise SettingsError(f"{key}: {message}" if key else message) from None


def resolve(annotation: Any, value: object, path: Path_, kinds: Mapping[str, str] | None = None) -> Any:
    """Replaces the mappings in `value` by the sections that a field's type annotation declares.

    annotation: such as `list[Term]` or `Schedule | None`. kinds: the allowed types of a `Choice`; None: those of its
    class. Raises SettingsError.
    """
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        if issubclass(annotation, Choice):
            return choose(annotation, value, path, kinds)
        return make(annotation, value, path) if issubclass(annotation, Section) else value
    arguments = typing.get_args(annotation)
    origin = typing.get_origin(annotation)
    if origin in (Union, types.UnionType):
        sections = [a for a in arguments if _contains_section(a)]
        return value if value is None or not sections else resolve(sections[0], value, path, kinds)
    if origin in (list, tuple) and arguments and _contains_section(arguments[0]):
        if not isinstance(value, list | tuple):
            raise SettingsError(f"{dotted(path)}: expected a list (got {value!r})")
        return [resolve(arguments[0], item, (*path, str(i)), kinds) for i, item in enumerate(value)]
    if origin is dict and _contains_section(arguments[1]):
        if not isinstance(value, Mapping):
            raise SettingsError(f"{dotted(path)}: expected a mapping (got {value!r})")
        return {key: resolve(arguments[1], item, (*path, str(key)), kinds) for key, item in value.items()}
    return value


def choose(base: type[Kind], value: object, path: Path_ = (), kinds: Mapping[str, str] | None = None) -> Kind:
    """Builds the subclass of `base` that `value` selects by its type, with its options. Raises SettingsError."""
    if isinstance(value, base):
        return value
    tree = base.expand(value)
    return make(kind_of(base, tree, path, kinds), tree, path)


def kind_of(base: type[Kind], tree: object, path: Path_ = (), kinds: Mapping[str, str] | None = None) -> type[Kind]:
    """Returns the subclass of `base`, registered or the user's, that `tree` selects by its `type`. kinds: allowed
    types; None: those of `base`. Raises SettingsError."""
    tree, kinds = base.expand(tree), base.kinds if kinds is None else kinds
    if not isinstance(tree, Mapping):
        raise SettingsError(f"{dotted(path)}: expected {one_of(kinds)} (got {tree!r})")
    default = base.model_fields["type"].default
    name = tree.get("type") or (default if isinstance(default, str) else None)
    key = dotted((*path, "type"))
    if current := current_forms(base, tree):
        raise SettingsError(_renamed_choice_message(key, tree, current))
    if name is None:
        raise SettingsError(f"{key} is missing; set it to {one_of(kinds)}")
    if name in kinds:
        return locate(kinds[name], key)
    if not isinstance(name, str) or ":" not in name:
        raise SettingsError(f"{key}={name} is unknown{nearest(str(name), kinds)}; use {one_of(kinds)}")
    kind = locate(name, key)
    if not (isinstance(kind, type) and issubclass(kind, base)):
        raise SettingsError(f"{key}={name} does not inherit from {base.__module__}:{base.__name__}")
    if inspect.isabstract(kind):
        missing = ", ".join(sorted(kind.__abstractmethods__))
        raise SettingsError(f"{key}={name} does not define {missing}, which {base.__module__}:{base.__name__} requires")
    return kind


def current_forms(base: type[Choice], value: object) -> list[dict[str, Any]]:
    """Returns the current form of a choice that is written as in an earlier release: one mapping, or several that
    together do the same. Returns [] if `value` is in its current form."""
    tree = base.expand(value)
    return moved.present_forms(base.title, tree) if isinstance(tree, Mapping) else []


def _renamed_choice_message(key: str, tree: Mapping[str, Any], current: list[dict[str, Any]]) -> str:
    """Returns the message for a choice in the form of an earlier release; options that keep their value are left out.

    current: see `current_forms`.
    """
    removed = [name for name in tree if name not in current[0]]
    changed = [
        {name: value for name, value in form.items() if name == "type" or name not in tree or tree[name] != value}
        for form in current
    ]
    return (
        f"{key}={tree['type']}{' with ' if removed else ''}{', '.join(removed)} is "
        f"{' and '.join(map(as_yaml, changed))} now; mmrl convert writes it"
    )


def as_yaml(value: object) -> str:
    """Returns a value as one line of YAML, as it is written in an override."""
    import yaml

    return yaml.safe_dump([value], default_flow_style=True, sort_keys=False, width=math.inf).strip()[1:-1]


def locate(target: str, key: str) -> Any:
    """Returns the object at `target`, "package.module:name". Raises SettingsError, which names the configuration's key
    `key`."""
    module, _, name = target.partition(":")
    try:
        members = vars(importlib.import_module(module))
    except (ImportError, ValueError) as error:
        hint = moved.hint_of(error) if isinstance(error, ImportError) else ""
        if isinstance(error, ModuleNotFoundError) and (extra := extra_with((error.name or "").partition(".")[0])):
            raise SettingsError(f"{key}={target} needs {error.name}; install it with: {extra_command(extra)}") from None
        # only a user's module can be missing because its folder is not on PYTHONPATH
        is_missing = isinstance(error, ModuleNotFoundError) and module.partition(".")[0] != "mmrl"
        path_hint = ", with its folder on PYTHONPATH" if is_missing else ""
        raise SettingsError(
            f"{key}={target}: no such object ({error}{hint}); expected package.module:name{path_hint}"
        ) from None
    except Exception as error:  # any fault of the user's module
        raise SettingsError(f"{key}={target}: {module} cannot be imported: {describe_error(error)}") from None
    if name not in members:
        reason = f"{module} has no {name}{moved.hint(target)}"
        raise SettingsError(f"{key}={target}: no such object ({reason}); expected package.module:name")
    return members[name]


def load_attribute(target: str) -> Any:
    """Returns the object of this package at `target`, "package.module:name".

    Settings name the code that they configure by such a string, because that code imports the settings in turn.
    """
    module, _, name = target.partition(":")
    return vars(importlib.import_module(module))[name]


def with_types(model: type[Section], tree: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `tree` with the default `type` of every choice written out. Raises SettingsError for an unknown type."""
    expanded = dict(tree)
    for name, section, value in _subsections(model, tree):
        expanded[name] = with_types(section, value)
    return expanded


def without_keys(
    model: type[Section], tree: Mapping[str, Any], drop: Callable[[Path_], bool], path: Path_ = ()
) -> dict[str, Any]:
    """Returns `tree` without those null keys that `model` does not have and for which `drop(path)` is true, at every
    level.

    Raises SettingsError for an unknown type.
    """
    field_names = set(model.model_fields)
    remaining = {
        name: value
        for name, value in tree.items()
        if value is not None or name in field_names or not drop((*path, name))
    }
    for name, section, value in _subsections(model, remaining):
        remaining[name] = without_keys(section, value, drop, (*path, name))
    return remaining


def has_key(model: type[Section], tree: Mapping[str, Any], path: Path_) -> bool:
    """Returns whether the configuration class `model`, with the types that `tree` selects, has the key at `path`."""
    if len(path) == 1:
        return path[0] in model.model_fields
    sections = _subsections(model, tree, always=path[0])
    return any(has_key(section, value, path[1:]) for name, section, value in sections if name == path[0])


def _subsections(
    model: type[Section], tree: Mapping[str, Any], always: str | None = None
) -> Iterable[tuple[str, type[Section], dict[str, Any]]]:
    """Yields the sections directly inside `tree`: the key, the class that its `type` selects, and its mapping with that
    type written out.

    always: a key that is yielded, with the default type, even if `tree` lacks it.
    """
    for name, field in model.model_fields.items():
        value = tree.get(name)
        if name == always and not value:
            value = {}
        if isinstance(field.default, Choice):
            value = field.default.expand(value) if isinstance(value, str) else value
        if isinstance(value, Mapping) and isinstance(field.default, Section):
            value = _with_default_type(field, value)
            section = type(field.default)
            if isinstance(field.default, Choice):
                section = kind_of(field.annotation, value, (name,), _allowed_types(field))  # type: ignore[arg-type]
            yield name, section, value


# --- from a section to a mapping ---


def plain(value: object, *, brief: bool = False) -> Any:
    """Converts a section to mappings, lists, strings and numbers, from which `make` builds the same section.

    brief: leave out keys whose default is empty (see NOTHING) and whose value is that default.
    """
    if isinstance(value, Choice) and (short := value.shorten(value)) is not None:
        return short
    if isinstance(value, Section):
        fields = type(value).model_fields
        items = {name: vars(value)[name] for name in fields}
        if brief:
            items = {name: item for name, item in items.items() if item not in NOTHING or item != fields[name].default}
        return {name: plain(item, brief=brief) for name, item in items.items()}
    if isinstance(value, Mapping):
        return {str(key): plain(item, brief=brief) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, brief=brief) for item in value]
    return str(value) if isinstance(value, Path) else value


def sections_in(value: object, base: type, path: Path_ = ()) -> Iterable[tuple[str, Any]]:
    """Yields every instance of `base` inside `value`, a section or a part of one, with its dotted path."""
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


def unknown_key_message(key: object, model: type[Section], path: Path_) -> str:
    """Returns the message for an unknown key. It names the current name of a renamed key, the key for which another
    library uses this name, the nearest valid key, or all valid keys."""
    valid = keys_of(model)
    if (current := moved.present_key(str(key))) in valid:
        return f"unknown key {dotted((*path, str(key)))}; it is {current} now; mmrl convert writes it"
    if (match := key_of_library(str(key))) is not None:
        library, key_here = match
        return f"unknown key {dotted((*path, str(key)))}; {key} of {library} is {key_here} here"
    close = difflib.get_close_matches(str(key), valid, n=1, cutoff=0.5)
    hint = f"did you mean {dotted((*path, close[0]))}?" if close else f"valid keys: {', '.join(valid)}"
    return f"unknown key {dotted((*path, str(key)))}; {hint}"


def key_of_library(name: str) -> tuple[str, str] | None:
    """Returns (library, key here) for the name of an option of another library, such as TRL; None for other names."""
    import json  # imported here, since only error messages need it

    table = json.loads(Path(__file__).with_name("external_keys.json").read_text())
    return (table[name][0], table[name][1]) if name in table else None


def nearest(name: str, names: Iterable[str]) -> str:
    """Returns " (did you mean ...?)" with the most similar of `names`, in any case; "" if none is similar."""
    by_lower = {each.lower(): each for each in names}
    close = difflib.get_close_matches(name.lower(), list(by_lower), n=1)
    return f" (did you mean {by_lower[close[0]]}?)" if close else ""


def one_of(kinds: Iterable[str]) -> str:
    """Returns the valid values of a `type` key, for messages."""
    return f"one of {', '.join(kinds)}, or package.module:Class"


def dotted(path: Path_) -> str:
    return ".".join(path)


def _allowed_types(field: FieldInfo) -> Mapping[str, str] | None:
    """Returns the types that `option(kinds=...)` allows for a key; None: those of its class."""
    extra = field.json_schema_extra
    kinds = extra.get("kinds") if isinstance(extra, dict) else None
    return kinds if isinstance(kinds, dict) else None  # type: ignore[return-value]


def _with_default_type(field: FieldInfo, value: object) -> Any:
    """Returns `value` with the `type` of the key's default, if it is the mapping of a choice without one."""
    if isinstance(field.default, Choice) and isinstance(value, Mapping) and "type" not in value:
        return {"type": field.default.type, **value}
    return value


def _accepts_none(annotation: object) -> bool:
    return annotation is Any or type(None) in typing.get_args(annotation)


def _contains_section(annotation: object) -> bool:
    """Returns whether a type annotation has a section in it, such as `list[Term]`."""
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return issubclass(annotation, Section)
    return any(_contains_section(argument) for argument in typing.get_args(annotation))


def _check_bounds(field: FieldInfo, value: object, path: Path_) -> None:
    """Checks the bounds of a number that may change during a run; see `mmrl.schedules.schedule.number`. Raises
    SettingsError."""
    extra = field.json_schema_extra
    if isinstance(value, Choice) and isinstance(extra, dict) and isinstance(bounds := extra.get("bounds"), dict):
        try:
            value.check(**bounds)  # type: ignore[attr-defined]
        except ValueError as error:
            raise SettingsError(f"{dotted(path)}: {error}") from None

"""Reads configuration files and overrides as plain trees of mappings and lists, and merges them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from yaml import YAMLError

from mmrl.settings import recipes


class TreeError(Exception):
    """An error in one line about a file or an override that cannot be read."""


@dataclass(frozen=True)
class Whole:
    """The value of an override that replaces the previous value, even if both are mappings (which are merged
    otherwise)."""

    value: Any


def read_yaml(path: Path, extended_by: tuple[Path, ...] = ()) -> list[tuple[Path, dict[str, Any]]]:
    """Reads a configuration file and the files that it extends, each with its tree: the base first, `path` last.

    path: a file, or the name of a shipped recipe. extended_by: files that led here by `extends`, to detect a cycle.
    Raises TreeError.
    """
    try:
        path = recipes.resolve(path)
    except FileNotFoundError as error:
        raise TreeError(str(error)) from None
    try:
        loaded = OmegaConf.load(path)
    except (YAMLError, UnicodeDecodeError) as error:
        raise TreeError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise TreeError(f"{path}: too many levels of lists and mappings") from None
    except OSError:  # omegaconf raises it for a document that is a number
        loaded = None  # type: ignore[assignment]
    if not isinstance(loaded, DictConfig) or not loaded:
        raise TreeError(f"{path}: expected a mapping at the top level, such as model: {{path: ...}}")
    tree: dict[str, Any] = OmegaConf.to_container(loaded)  # type: ignore[assignment]
    if any(len(str(key).split()) > 1 for key in tree):  # a string, which omegaconf reads as a mapping of one key
        raise TreeError(
            f"{path}: expected a mapping at the top level, not a string; mmrl convert reads scripts of other libraries"
        )
    base = tree.pop("extends", None)
    if base is None:
        return [(path, tree)]
    if not isinstance(base, str):
        raise TreeError(f"{path}: extends: expected the path of one YAML file (got {base!r})")
    chain = (*extended_by, path.resolve())
    extended = recipes.resolve_from(path.parent, base)
    if extended.resolve() in chain:
        raise TreeError(
            f"{path}: extends: {base} extends {path} again, maybe through others; remove an `extends` of this circle"
        )
    return [*read_yaml(extended, chain), (path, tree)]


def read_overrides(texts: Sequence[str]) -> list[dict[str, Any]]:
    """Parses overrides of one command line into trees, in the order in which they are merged. Raises TreeError.

    An override `section.type=...` comes before those of the section's other keys, since a section of another type
    replaces the one that they would change. Otherwise the order is that of the command line."""
    ordered: list[tuple[list[str], dict[str, Any]]] = []
    for text in texts:
        key, tree = text.partition("=")[0].split("."), read_override(text)
        ordered.insert(_insert_at(key, [other for other, _ in ordered]), (key, tree))
    return [tree for _, tree in ordered]


def _insert_at(key: list[str], earlier: list[list[str]]) -> int:
    """Returns where an override of `key` is inserted among `earlier` ones: at the end, except for a `type`."""
    section, position = key[:-1], len(earlier)
    if key[-1] != "type" or not section:
        return position
    for i in reversed(range(len(earlier))):
        if section[: len(earlier[i])] == earlier[i] or earlier[i] == key:  # it sets the section as a whole, or the type
            break
        if earlier[i][: len(section)] == section:
            position = i
    return position


def read_override(text: str) -> dict[str, Any]:
    """Parses `key.subkey=value` into a tree. A mapping in braces replaces the previous value. Raises TreeError."""
    key, equals, value_text = text.partition("=")
    if not equals or not key or not all(key.split(".")):
        raise TreeError(f"override {text!r} is not of the form key.subkey=value")
    if not value_text.strip():
        raise TreeError(f"override {text!r} gives no value; {key}=null unsets the key")
    try:
        value = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value_text}"]))["value"]  # type: ignore[index,call-overload]
    except YAMLError as error:
        raise TreeError(f"override {text!r}: not valid YAML: {' '.join(str(error).split())}") from None
    tree: Any = Whole(value) if isinstance(value, Mapping) else value
    for part in reversed(key.split(".")):
        tree = {part: tree}
    return tree


def merged(base: Any, override: Any, path: tuple[str, ...] = ()) -> Any:
    """Merges `override` into `base` and returns the result: mappings key by key, anything else is replaced.

    A mapping with another `type` is replaced too, since its options differ. A number as a key selects an item of a
    list. path: keys that lead to `base`, for messages. Raises TreeError, which names the key, for an item that a list
    does not have.
    """
    if isinstance(override, Whole):
        return override.value
    if not isinstance(override, Mapping):
        return override
    if isinstance(base, list):
        return _merge_items(base, override, path)
    if isinstance(base, str) and path and "type" not in override:
        base = {"type": base}  # the short form of a choice
    if not isinstance(base, Mapping) or _types_differ(base, override):
        base = {}
    result = dict(base)
    for key, value in override.items():
        result[key] = merged(result.get(key), value, (*path, str(key)))
    return result


def _types_differ(base: Mapping[str, Any], override: Mapping[str, Any]) -> bool:
    return "type" in base and "type" in override and base["type"] != override["type"]


def _merge_items(base: list[Any], override: Mapping[str, Any], path: tuple[str, ...]) -> list[Any]:
    """Merges overrides of list items, keyed by number ("0", "1"), into the list `base`. Raises TreeError for an item
    that the list does not have."""
    items = list(base)
    for key, value in override.items():
        key_path = ".".join((*path, str(key)))
        if not str(key).isdigit() or int(key) >= len(base):
            items_text = f"its items are 0 to {len(base) - 1}" if base else "it has no items"
            raise TreeError(f"{key_path}: {'.'.join(path)} is a list of {len(base)}; {items_text}")
        items[int(key)] = merged(base[int(key)], value, (*path, str(key)))
    return items

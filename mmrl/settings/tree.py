"""Reads configuration files and overrides as plain trees of mappings and lists, and merges them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from yaml import YAMLError

from mmrl.settings import recipes


class TreeError(Exception):
    """An error in one line about a file or an override that can not be read."""


@dataclass(frozen=True)
class Whole:
    """A value of an override that replaces the previous one, even where both are mappings."""

    value: Any


def read_yaml(path: Path, extended_by: tuple[Path, ...] = ()) -> list[tuple[Path, dict[str, Any]]]:
    """Returns the files that `path` extends, base first, and then `path`, each with its tree. `path` may be the name of
    a shipped recipe. Raises TreeError."""
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
    except OSError:  # by omegaconf for a document that is a number
        loaded = None  # type: ignore[assignment]
    if not isinstance(loaded, DictConfig) or not loaded:
        raise TreeError(f"{path}: expected a mapping at the top level")
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
        raise TreeError(f"{path}: extends: {base} extends this file in turn")
    return [*read_yaml(extended, chain), (path, tree)]


def read_override(text: str) -> dict[str, Any]:
    """Returns the tree of `key.subkey=value`. A mapping in braces replaces the previous value. Raises TreeError."""
    key, equals, written = text.partition("=")
    if not equals or not key or not all(key.split(".")):
        raise TreeError(f"override {text!r} is not of the form key.subkey=value")
    if not written.strip():
        raise TreeError(f"override {text!r} gives no value; {key}=null unsets the key")
    try:
        value = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={written}"]))["value"]  # type: ignore[index,call-overload]
    except YAMLError as error:
        raise TreeError(f"override {text!r}: not valid YAML: {' '.join(str(error).split())}") from None
    tree: Any = Whole(value) if isinstance(value, Mapping) else value
    for part in reversed(key.split(".")):
        tree = {part: tree}
    return tree


def merged(base: Any, extra: Any, path: tuple[str, ...] = ()) -> Any:
    """Merges `extra` over `base`: mappings key by key, anything else is replaced. A mapping of another `type` is
    replaced too, since its options differ. A number as a key selects an item of a list.

    Raises TreeError naming a key below something that has no keys.
    """
    if isinstance(extra, Whole):
        return extra.value
    if not isinstance(extra, Mapping):
        return extra
    if isinstance(base, list):
        return _with_items(base, extra, path)
    if isinstance(base, str) and path and "type" not in extra:
        base = {"type": base}  # the short form of a choice
    if not isinstance(base, Mapping) or _of_another_type(base, extra):
        base = {}
    result = dict(base)
    for key, value in extra.items():
        result[key] = merged(result.get(key), value, (*path, str(key)))
    return result


def _of_another_type(base: Mapping[str, Any], extra: Mapping[str, Any]) -> bool:
    return "type" in base and "type" in extra and base["type"] != extra["type"]


def _with_items(base: list[Any], extra: Mapping[str, Any], path: tuple[str, ...]) -> list[Any]:
    """Merges overrides of list items by number ("0", "1") into a list. Raises TreeError for a number beyond it."""
    items = list(base)
    for key, value in extra.items():
        where = ".".join((*path, str(key)))
        if not str(key).isdigit() or int(key) >= len(base):
            raise TreeError(f"{where}: {'.'.join(path)} is a list of {len(base)}; its items are 0 to {len(base) - 1}")
        items[int(key)] = merged(base[int(key)], value, (*path, str(key)))
    return items
